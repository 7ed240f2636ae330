#pragma once

#include <memory>

#include "gpt.h"
#include "tessera/tessera.h"
#include "trainable.h"

namespace train_gpt {

// The model on several ranks, in the ZeRO stage that `options` names; in stage 3 a unit is a block.
// `AdamW` is torch's, or Tessera's for host memory.
template <class AdamW>
class DistributedModel final : public Trainable {
 public:
  // `zero` without groups and a wrap policy: this class sets them.
  DistributedModel(Gpt model, const torch::optim::AdamWOptions& options, std::shared_ptr<tessera::Communicator> comm,
                   tessera::ZeroOptions zero);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  double clip_grad_norm(double max_norm) override;
  void step() override;
  void zero_grad() override;
  torch::optim::Optimizer& optimizer() override { return zero_.optimizer(); }
  tessera::ModelShards& shards() override { return zero_; }
  MemoryUse memory() const override;
  std::string describe() const override;

 private:
  size_t units_;
  mutable tessera::Zero<Gpt, AdamW> zero_;
};

extern template class DistributedModel<torch::optim::AdamW>;
extern template class DistributedModel<tessera::HostAdamW>;

}  // namespace train_gpt
