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

// This rank's part of one tensor of the training state. `fqn` is the tensor's name in the checkpoint. `tensor` has
// held.numel() elements in memory order, and is a view of the live tensor if possible. A tensor on disk is passed
// unchanged. If replica_count is 0, another rank saves the tensor.
struct LocalTensor : NamedShard {
  TensorKind kind = TensorKind::kParameter;
};

// Maps an optimizer's parameters to the names of the model's parameters.
class NamedOptimizer {
 public:
  // `optimizer` must outlive this object. Throws std::invalid_argument for a parameter that the model lacks, and for an
  // optimizer unknown to optim/state/optimizer_state.h.
  NamedOptimizer(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer);

  // Return the names of the optimizer's algorithm and of the form of its state. Lamb's state has the form of AdamW's.
  const std::string& kind() const { return kind_; }
  const std::string& state_kind() const { return state_kind_; }
  torch::optim::Optimizer& whole() { return whole_; }
  const std::vector<std::vector<std::string>>& groups() const { return groups_; }  // names by group, each name once
  bool sharded() const { return shards_ != nullptr; }
  bool has(const std::string& fqn) const { return names_.contains(fqn); }
  const std::set<std::string>& names() const { return names_; }
  // Returns whether the optimizer has the parameter and, if the optimizer is sharded, this rank owns the parameter.
  bool keeps(const NamedShard& shard) const {
    return has(shard.fqn) && (shards_ == nullptr || shards_->owns(shard.tensor));
  }
  // Returns the parameter's `values` as this rank holds them. A sharded optimizer may round the values on ranks that do
  // not own the parameter.
  at::Tensor as_kept(const at::Tensor& parameter, const at::Tensor& values) const {
    return shards_ == nullptr ? values : shards_->as_received(parameter, values);
  }
  // Returns the parameter's state, or null if this rank has none.
  const torch::optim::OptimizerParamState* state(const NamedShard& shard) const;
  void set_state(const NamedShard& shard, std::unique_ptr<torch::optim::OptimizerParamState> state);

 private:
  torch::optim::Optimizer& whole_;
  const OptimizerShards* shards_;  // null if the optimizer is not sharded
  std::string state_kind_, kind_;
  std::vector<std::vector<std::string>> groups_;
  std::set<std::string> names_;
};

// The optimizers of a training state, by name.
using NamedOptimizers = std::map<std::string, NamedOptimizer>;
// Throws std::invalid_argument if a parameter is in two optimizers, or if NamedOptimizer's constructor throws it.
NamedOptimizers named_optimizers(const std::vector<NamedShard>& shards,
                                 const std::map<std::string, torch::optim::Optimizer*>& optimizers);

// Returns a new host tensor for the shard's elements, in the shape of shard.tensor, and a flat view of that tensor. For
// a shard on disk, the tensor's memory is a file on that disk.
std::pair<at::Tensor, at::Tensor> host_like(const NamedShard& shard, at::ScalarType dtype);

std::string state_name(const std::string& key, const std::string& fqn);  // "optim.exp_avg.blocks.0.weight"

// Returns the shards with strides that define an order of elements. Strides with holes or overlaps (a column of a
// table, an expanded tensor) become row-major, and the parameter is then saved as a dense copy.
std::vector<NamedShard> in_dense_order(std::vector<NamedShard> shards);

// Returns the buffers, each tensor once. If a tensor has several names, `fqn` is the first; `aliases` has the others.
std::vector<LocalTensor> local_buffers(const ModelShards& model);
// Returns this rank's parameters, buffers, optimizer state and tensors of `beside`. `shards` must be from
// in_dense_order(). Throws std::invalid_argument for a tensor that is not strided, such as a sparse one.
std::vector<LocalTensor> local_tensors(const ModelShards& model, const std::vector<NamedShard>& shards,
                                       const NamedOptimizers& optimizers,
                                       const std::vector<std::shared_ptr<Stateful>>& beside = {});
// Returns the tensors of the Stateful objects under their names in the checkpoint: "beside.<state_name>.<fqn>".
std::vector<NamedShard> shards_beside(const std::vector<std::shared_ptr<Stateful>>& beside);
// Returns the optimizer without its tensors. `numbers` has only parameters whose state is on this rank.
SavedOptimizer local_optimizer(const std::vector<NamedShard>& shards, NamedOptimizer& optimizer);

// Returns the pieces that this rank must write. Each element is written by one replica; replicas share the work evenly.
std::vector<Piece> pieces_of(const std::vector<LocalTensor>& tensors, int rank);

// Blocks until the current stream has finished all submitted work, before another thread reads results of that work.
// Does not wait for other streams.
void await_current_stream(at::Device device);

// Get and set the states of the default generators. Setting skips absent devices, and states of another length.
GeneratorStates generator_states(at::Device device);
void set_generator_states(const GeneratorStates& states, at::Device device);

}  // namespace tessera::internal
