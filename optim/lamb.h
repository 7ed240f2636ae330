#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "tessera/flat/model_shards.h"

namespace tessera {

// LAMB (You et al., 2020, algorithm 2, with bias correction): Adam's direction plus weight decay,
// scaled for each parameter by the norm of the parameter over the norm of the direction (1 where
// either is 0).
//
// The norms are of whole parameters, so an optimizer that sees shards alone is only approximate.
// This one adds up the squares of all parameters' parts over the ranks, in one all-reduce of two
// numbers a parameter, and equals the unsharded one to rounding.
//
// Options and states are AdamW's, so that checkpoints know them; amsgrad is refused. Parameters
// are of floating-point type; states and norms are computed in their dtype and in double. A step
// takes one more tensor of each parameter's shard.
class Lamb : public torch::optim::Optimizer {
 public:
  // Of whole parameters, alike on all ranks.
  explicit Lamb(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamWOptions defaults = {});
  explicit Lamb(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {});

  // Of the parts that a wrapper shows: FullyShardedDataParallel, in any groups. Every group's
  // tensors are among model.named_shards(), else std::invalid_argument. step() is collective over
  // model.comm(): the same groups, in the same order, on all ranks.
  Lamb(const ModelShards& model, std::vector<torch::optim::OptimizerParamGroup> groups,
       torch::optim::AdamWOptions defaults = {});
  explicit Lamb(const ModelShards& model, torch::optim::AdamWOptions defaults = {});

  // Throws CommError, and std::invalid_argument for sparse gradients.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<Communicator> comm_;                  // null: parameters are whole
  std::unordered_set<const c10::TensorImpl*> counted_;  // whose squares this rank contributes
};

}  // namespace tessera
