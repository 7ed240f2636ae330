#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include <tessera/detail/parameter_parts.h>

namespace tessera {

// LAMB (You et al., 2020, algorithm 2, with bias correction): scales Adam's direction plus weight decay by the ratio of
// the parameter's norm to the direction's norm (1 if either is 0).
//
// Norms are computed over whole parameters, in double. If parameters are sharded, one all-reduce per step sums the
// squares of all parts, with two numbers for each parameter. Results equal the unsharded optimizer's up to rounding.
// Options and states are AdamW's, so checkpoints support them. amsgrad must be false. Parameters must be of
// floating-point type; states have the parameter's dtype. A step allocates one more tensor of each shard's size.
class Lamb : public torch::optim::Optimizer {
 public:
  // Accepts whole parameters, equal on all ranks. A parameter that a group lists twice (tied weights) is stepped once.
  // Throws std::invalid_argument for shards, for amsgrad, and for a parameter in two groups. For options out of range,
  // throws like torch::optim::AdamW.
  explicit Lamb(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamWOptions defaults = {});
  explicit Lamb(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {});

  // Accepts the parameters of a wrapper, such as the shards of FullyShardedDataParallel. The groups must be equal and
  // in the same order on all ranks. Also throws std::invalid_argument for tensors that are not in model.named_shards().
  // Construction and step() are collective over model.comm().
  Lamb(const ModelShards& model, std::vector<torch::optim::OptimizerParamGroup> groups,
       torch::optim::AdamWOptions defaults = {});
  explicit Lamb(const ModelShards& model, torch::optim::AdamWOptions defaults = {});

  // Adds a group. Throws like the constructors, with nothing changed. Collective if constructed with a wrapper.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Takes one step. Throws CommError. Throws std::invalid_argument, with nothing changed, for sparse gradients, complex
  // parameters, and groups that the constructors would refuse.
  at::Tensor step(LossClosure closure = nullptr) override;
  // For torch::save: writes this rank's state in AdamW's format.
  void save(torch::serialize::OutputArchive& archive) const override;
  // For torch::load: reads the output of save().
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void check();

  internal::ParameterParts parts_;
  size_t checked_groups_ = 0;
};

}  // namespace tessera
