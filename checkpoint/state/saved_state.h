#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/model_shards.h>
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// This rank's part of one tensor of the training state, as a shard: `fqn` is the name that it is saved under, `tensor`
// [held.numel()] in the order of memory, a view of the live tensor wherever that can be. A replica_count of 0: another
// rank has what is to be saved.
struct LocalTensor : NamedShard {
  TensorKind kind = TensorKind::kParameter;
};

// An optimizer's parameters by the names of the model that they belong to.
class NamedOptimizer {
 public:
  // `optimizer` must outlive this. Throws std::invalid_argument for a parameter that is not the model's and for an
  // optimizer that optim/state/optimizer_state.h does not know.
  NamedOptimizer(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer);

  // What it computes, and the kind of its states, which Lamb has in common with AdamW.
  const std::string& kind() const { return kind_; }
  const std::string& state_kind() const { return state_kind_; }
  torch::optim::Optimizer& whole() { return whole_; }
  const std::vector<std::vector<std::string>>& groups() const { return groups_; }  // names, each once in a group
  bool sharded() const { return shards_ != nullptr; }
  bool has(const std::string& fqn) const { return names_.contains(fqn); }
  // Whether the parameter's state, if there is one, is kept on this rank.
  bool keeps(const NamedShard& shard) const {
    return has(shard.fqn) && (shards_ == nullptr || shards_->owns(shard.tensor));
  }
  // What this rank has of a parameter of these values: a sharded optimizer may round what others than the owner have.
  at::Tensor as_kept(const at::Tensor& parameter, const at::Tensor& values) const {
    return shards_ == nullptr ? values : shards_->as_received(parameter, values);
  }
  // The parameter's state; null if there is none here.
  const torch::optim::OptimizerParamState* state(const NamedShard& shard) const;
  void set_state(const NamedShard& shard, std::unique_ptr<torch::optim::OptimizerParamState> state);

 private:
  torch::optim::Optimizer& whole_;
  const OptimizerShards* shards_;  // null unless the optimizer is sharded itself
  std::string state_kind_, kind_;
  std::vector<std::vector<std::string>> groups_;
  std::set<std::string> names_;
};

// A new tensor for the elements of a shard, and its flat view: host memory, shaped like shard.tensor.
std::pair<at::Tensor, at::Tensor> host_like(const NamedShard& shard, at::ScalarType dtype);

std::string state_name(const std::string& key, const std::string& fqn);  // "optim.exp_avg.blocks.0.weight"

// The shards with strides that tell an order of elements: row-major where those of a parameter have holes or overlaps
// (a column of a table, an expanded one), as its dense copy is saved.
std::vector<NamedShard> in_dense_order(std::vector<NamedShard> shards);

// Buffers with each tensor once: {name, aliases} as for parameters.
std::vector<LocalTensor> local_buffers(const ModelShards& model);
// Parameters, buffers and the tensors of the optimizer's state (if not null) that are here; `shards` as of
// in_dense_order(). Throws std::invalid_argument for a tensor that is not strided, as a sparse one.
std::vector<LocalTensor> local_tensors(const ModelShards& model, const std::vector<NamedShard>& shards,
                                       const NamedOptimizer* optimizer,
                                       const std::vector<std::shared_ptr<Stateful>>& beside = {});
// The tensors of what is beside the model, under the names that they are saved under: "beside.<state_name>.<fqn>".
std::vector<NamedShard> shards_beside(const std::vector<std::shared_ptr<Stateful>>& beside);
// The rest of the optimizer; `numbers` only of states that are kept here.
SavedOptimizer local_optimizer(const std::vector<NamedShard>& shards, NamedOptimizer& optimizer);

// What this rank is to write: every element of what replicas share is one replica's, the work shared evenly.
std::vector<Piece> pieces_of(const std::vector<LocalTensor>& tensors, int rank);

// Returns when the device has done what it was asked for: for a thread that goes on with streams of its own.
void synchronize(at::Device device);

// The default generators' states, and back: those of devices that are here, of the lengths that they have here.
GeneratorStates generator_states(at::Device device);
void set_generator_states(const GeneratorStates& states, at::Device device);

}  // namespace tessera::internal
