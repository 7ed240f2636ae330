#pragma once

#include <memory>

#include "gpt.h"
#include "tessera/tessera.h"
#include "trainable.h"

namespace train_gpt {

// The model with parameters, gradients and optimizer state split over the ranks, a unit a block.
class ShardedModel final : public Trainable {
 public:
  // `options` without a policy: this class sets it.
  ShardedModel(Gpt model, std::shared_ptr<tessera::Communicator> comm, tessera::FsdpOptions options);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const override;
  double clip_grad_norm(double max_norm) override;
  void zero_grad() override;
  MemoryUse memory() const override;
  std::string describe() const override;

 private:
  size_t units_;
  tessera::FullyShardedDataParallel<Gpt> fsdp_;
};

}  // namespace train_gpt
