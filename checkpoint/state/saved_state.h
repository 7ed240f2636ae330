#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/model/model_shards.h>
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// This rank's part of one tensor of the training state. `fqn` is the tensor's name in the checkpoint. `tensor` contains
// this rank's elements in memory order, as a view of the live tensor if possible. For a tensor on disk, `tensor` is the
// original tensor. If replica_count is 0, another rank saves the tensor.
struct LocalTensor : NamedShard {
  TensorKind kind = TensorKind::kParameter;
};

// An optimizer, with the names that its parameters have in the model.
class NamedOptimizer {
 public:
  // `optimizer` must outlive this object. Throws std::invalid_argument for a parameter outside the model, and for an
  // optimizer class that optim/state/optimizer_state.h does not support.
  NamedOptimizer(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer);

  // kind() returns the algorithm. state_kind() returns the algorithm whose state format is used (AdamW for Lamb).
  const std::string& kind() const { return kind_; }
  const std::string& state_kind() const { return state_kind_; }
  torch::optim::Optimizer& whole() { return whole_; }
  const std::vector<std::vector<std::string>>& groups() const { return groups_; }  // parameter names of each group
  bool sharded() const { return shards_ != nullptr; }
  bool has(const std::string& fqn) const { return names_.contains(fqn); }
  const std::set<std::string>& names() const { return names_; }
  // Returns whether this rank keeps the parameter's state. With a sharded optimizer, only the owner keeps it.
  bool keeps(const NamedShard& shard) const {
    return has(shard.fqn) && (shards_ == nullptr || shards_->owns(shard.tensor));
  }
  // Returns a parameter's `values` as this rank would hold them. With a sharded optimizer, ranks that do not own the
  // parameter may hold rounded values.
  at::Tensor as_kept(const at::Tensor& parameter, const at::Tensor& values) const {
    return shards_ == nullptr ? values : shards_->as_received(parameter, values);
  }
  // Returns the parameter's state, or null if this rank has no state of the parameter.
  const torch::optim::OptimizerParamState* state(const NamedShard& shard) const;
  void set_state(const NamedShard& shard, std::unique_ptr<torch::optim::OptimizerParamState> state);

 private:
  torch::optim::Optimizer& whole_;
  const OptimizerShards* shards_;  // null if the optimizer is not sharded
  std::string state_kind_, kind_;
  std::vector<std::vector<std::string>> groups_;
  std::set<std::string> names_;
};

using NamedOptimizers = std::map<std::string, NamedOptimizer>;  // the key is the optimizer's name
// Throws std::invalid_argument if a parameter is in two optimizers, or if NamedOptimizer's constructor throws.
NamedOptimizers named_optimizers(const std::vector<NamedShard>& shards,
                                 const std::map<std::string, torch::optim::Optimizer*>& optimizers);

// Returns an uninitialized host tensor with the shape of shard.tensor, and a flat view of that tensor. For a shard on
// disk, the tensor's memory is a file on that disk.
std::pair<at::Tensor, at::Tensor> host_like(const NamedShard& shard, at::ScalarType dtype);

std::string state_name(const std::string& key, const std::string& fqn);  // returns "optim.exp_avg.blocks.0.weight"

// Returns the shards, but replaces strides with holes or overlaps by row-major strides. Column views and expanded
// tensors have such strides, and are saved as dense copies.
std::vector<NamedShard> in_dense_order(std::vector<NamedShard> shards);

// Returns the model's buffers, each tensor once. `fqn` is the tensor's first name. `aliases` lists its other names.
std::vector<LocalTensor> local_buffers(const ModelShards& model);
// Returns this rank's parameters, buffers, optimizer state, and tensors of the Stateful objects `beside`. `shards` must
// be the result of in_dense_order(). Throws std::invalid_argument for sparse tensors, unsupported dtypes, equal names.
std::vector<LocalTensor> local_tensors(const ModelShards& model, const std::vector<NamedShard>& shards,
                                       const NamedOptimizers& optimizers,
                                       const std::vector<std::shared_ptr<Stateful>>& beside = {});
// Returns the tensors of the Stateful objects under their names in the checkpoint: "beside.<state_name>.<fqn>".
std::vector<NamedShard> shards_beside(const std::vector<std::shared_ptr<Stateful>>& beside);
// Returns the optimizer without state tensors. `numbers` contains only parameters whose state is on this rank.
SavedOptimizer local_optimizer(const std::vector<NamedShard>& shards, NamedOptimizer& optimizer);

// Returns the pieces that this rank must write. Exactly one replica writes each element, and replicas share the work.
std::vector<Piece> pieces_of(const std::vector<LocalTensor>& tensors, int rank);

// Blocks until the current stream has finished all submitted work, so that another thread can read the results. Does
// not wait for other streams.
void await_current_stream(at::Device device);

// Get and set the default generators' states. The setter skips states of absent devices and states of another length.
GeneratorStates generator_states(at::Device device);
void set_generator_states(const GeneratorStates& states, at::Device device);

}  // namespace tessera::internal
