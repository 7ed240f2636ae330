#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include <tessera/detail/parameter_parts.h>

namespace tessera {

// LAMB (You et al., 2020, algorithm 2, with bias correction): Adam's direction plus weight decay, scaled for each
// parameter by the norm of the parameter over the norm of the direction (1 where either is 0).
//
// The norms are of whole parameters: squares of all parts are added up over the ranks, in one all-reduce of two numbers
// a parameter, so that it equals the unsharded one to rounding. Options and states are AdamW's, so that checkpoints
// know them; amsgrad is refused. Parameters are of floating-point type; states have their dtype, norms are in double. A
// step takes one more tensor of each parameter's shard.
class Lamb : public torch::optim::Optimizer {
 public:
  // Of whole parameters, alike on all ranks. Throws std::invalid_argument for shards.
  explicit Lamb(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamWOptions defaults = {});
  explicit Lamb(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {});

  // Of the parts that FullyShardedDataParallel shows, in any groups, the same in the same order on all ranks. Throws
  // std::invalid_argument for tensors that are not among model.named_shards(). Collective over model.comm(), as step().
  Lamb(const ModelShards& model, std::vector<torch::optim::OptimizerParamGroup> groups,
       torch::optim::AdamWOptions defaults = {});
  explicit Lamb(const ModelShards& model, torch::optim::AdamWOptions defaults = {});

  // As torch's; throws as construction does, with nothing changed. Collective where a wrapper is given.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Throws CommError, and std::invalid_argument for sparse gradients and for groups that construction would refuse.
  at::Tensor step(LossClosure closure = nullptr) override;
  // torch::save and torch::load of this rank's state, in AdamW's format.
  void save(torch::serialize::OutputArchive& archive) const override;
  // What save() has written.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void check();

  ParameterParts parts_;
  size_t checked_groups_ = 0;
};

}  // namespace tessera
