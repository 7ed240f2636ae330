#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/shard_writer.h"
#include "tessera/flat/model_shards.h"

namespace tessera {

// This rank's part of one named tensor of the training state.
struct LocalTensor {
  std::string name;
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  std::vector<int64_t> sizes;    // of the whole tensor
  std::vector<int64_t> strides;  // of the whole tensor: the order of its elements in memory
  Range held;                    // what is here, in elements in the order of memory
  at::Tensor elements;           // [held.numel()], a view of the live tensor wherever that can be
  int replica = 0;               // which of the replica_count ranks that hold this very part
  int replica_count = 1;         // 0: another rank has what is to be saved
};

// An optimizer's parameters by the names of the model that they belong to.
class NamedOptimizer {
 public:
  // Both must outlive this. Throws std::invalid_argument for a parameter that is not the model's
  // and for an optimizer that flat/optimizer_state.h does not know.
  NamedOptimizer(const std::vector<NamedShard>& shards, torch::optim::Optimizer& optimizer);

  const std::string& kind() const { return kind_; }
  torch::optim::Optimizer& whole() { return whole_; }
  const std::vector<std::vector<std::string>>& groups() const { return groups_; }  // names, by group
  // Whether the parameter's state is kept on this rank, and whether on all that hold the parameter.
  bool owns(const NamedShard& shard) const;
  bool sharded() const { return shards_ != nullptr; }
  bool has(const std::string& fqn) const { return names_.contains(fqn); }
  // The parameter's state; null if there is none.
  const torch::optim::OptimizerParamState* state(const NamedShard& shard) const;
  void set_state(const NamedShard& shard, std::unique_ptr<torch::optim::OptimizerParamState> state);

 private:
  torch::optim::Optimizer& whole_;
  OptimizerShards* shards_;  // null unless the optimizer is sharded itself
  std::string kind_;
  std::vector<std::vector<std::string>> groups_;
  std::map<std::string, int> names_;
};

// A shard's elements in the order of memory: [held.numel()], a view unless `tensor` has other
// strides than the shard says. `tensor` has the shape of shard.tensor.
at::Tensor flat_elements(const at::Tensor& tensor, const NamedShard& shard);

// A new tensor for the elements of a shard, and its flat view: host memory, shaped like shard.tensor.
std::pair<at::Tensor, at::Tensor> host_like(const NamedShard& shard, at::ScalarType dtype);

std::string state_name(const std::string& key, const std::string& fqn);  // "optim.exp_avg.blocks.0.weight"

// Buffers with each tensor once: {name, aliases} as for parameters.
std::vector<LocalTensor> local_buffers(const ModelShards& model);
// Parameters, buffers and the tensors of the optimizer's state (if not null) that are here.
std::vector<LocalTensor> local_tensors(const ModelShards& model, const std::vector<NamedShard>& shards,
                                       const NamedOptimizer* optimizer);
// The rest of the optimizer; `numbers` only of states that are kept here.
SavedOptimizer local_optimizer(const std::vector<NamedShard>& shards, NamedOptimizer& optimizer);

// What this rank is to write: every element of what replicas share is one replica's, the work
// shared evenly between them.
std::vector<Piece> pieces_of(const std::vector<LocalTensor>& tensors, int rank);

// The default generators' states by device type, and back.
std::map<std::string, std::string> generator_states(at::Device device);
void set_generator_states(const std::map<std::string, std::string>& states, at::Device device);

}  // namespace tessera
