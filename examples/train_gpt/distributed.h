#pragma once

#include <memory>

#include <tessera/tessera.h>
#include "gpt.h"
#include "trainable.h"

namespace train_gpt {

// The model on several ranks, in the ZeRO stage that `options` names; in stage 3 a unit is a block.
template <class Optimizer, class Options>
class DistributedModel final : public Trainable {
 public:
  // `zero` without groups and a wrap policy: this class sets them.
  DistributedModel(Gpt model, const Options& options, std::shared_ptr<tessera::Communicator> comm,
                   tessera::ZeroOptions zero);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  double clip_grad_norm(double max_norm) override;
  void step() override;
  void zero_grad() override;
  torch::optim::Optimizer& optimizer() override { return zero_.optimizer(); }
  tessera::ModelShards& shards() override { return zero_; }
  std::optional<tessera::Scope> averaged() override;
  NamedTensors full_state() override { return zero_.full_state_dict(); }
  MemoryUse memory() const override;
  std::string describe() const override;

 private:
  size_t units_;
  mutable tessera::Zero<Gpt, Optimizer> zero_;
};

}  // namespace train_gpt
