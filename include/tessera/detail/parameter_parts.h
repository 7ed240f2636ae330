#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include <tessera/model/model_shards.h>

namespace tessera::internal {

// Maps an optimizer's tensors to the parameters that they are parts of, and to the ranks with the other parts. For
// optimizers that are not elementwise.
class ParameterParts {
 public:
  // For whole parameters on one rank.
  ParameterParts() = default;
  // For a wrapper's parameters. Is collective over model.comm(): one small all-gather.
  explicit ParameterParts(const ModelShards& model);

  // Throws std::invalid_argument, which names `optimizer`, for a tensor that is not in the wrapper's parameters(), or,
  // without a wrapper, for a shard. With a wrapper it is collective, and throws on all ranks if groups, their options
  // or their order differ between ranks.
  void require_known(const std::vector<torch::optim::OptimizerParamGroup>& groups, const char* optimizer) const;

  // Returns the shard of a parameter. A whole parameter has its current strides, which set_data() may have changed.
  // Without a wrapper, the parameter is whole and has no name.
  NamedShard of(const at::Tensor& parameter) const;
  // The range of a parameter that a rank holds, and the replica of the model that the rank belongs to. by_rank() is
  // empty without a wrapper.
  struct Held {
    Range range;
    int copy = 0;
  };
  const std::vector<Held>& by_rank(const at::Tensor& parameter) const;

  // Returns the wrapper's group; null without a wrapper.
  Communicator* comm() const { return comm_.get(); }
  // Whether parameters may be cut (FullyShardedDataParallel on more than one rank). Equal on all ranks.
  bool are_cut() const { return are_cut_; }
  // Whether a sum over ranks must include this rank's part: each part counts in one replica only.
  bool counts(const at::Tensor& parameter) const { return !are_cut_ || of(parameter).replica == 0; }

  // Returns for each parameter whether any rank has a gradient of it; a rank without elements of it may not know this
  // alone. Is collective if parameters are cut: one small all-reduce.
  std::vector<bool> have_gradients(const std::vector<at::Tensor>& parameters) const;

 private:
  struct Known {
    NamedShard shard;
    std::vector<Held> by_rank;
  };
  const Known& known(const at::Tensor& parameter) const;

  std::shared_ptr<Communicator> comm_;
  std::unordered_map<const c10::TensorImpl*, Known> known_;
  bool are_cut_ = false;
};

// Returns a dense tensor's elements in memory order, [numel], as a view.
at::Tensor in_memory_order(const at::Tensor& dense);

// Returns `tensor`, or a copy of it with these strides, dtype and device unchanged.
at::Tensor in_strides(const at::Tensor& tensor, at::IntArrayRef strides);

// Restores the options with which the groups from index `first` on were added. libtorch 2.15 replaces options of
// classes other than its own by the optimizer's defaults. Options of its own classes stay as libtorch merged them.
void restore_options(std::vector<torch::optim::OptimizerParamGroup>& groups, size_t first,
                     const std::vector<torch::optim::OptimizerParamGroup>& added);

// Calls libtorch's add_param_group() and removes the group again if `check` throws.
template <class Check>
void add_checked_group(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group,
                       Check check) {
  optimizer.add_param_group(group);
  restore_options(optimizer.param_groups(), optimizer.param_groups().size() - 1, {group});
  try {
    check();
  } catch (...) {
    optimizer.param_groups().pop_back();
    throw;
  }
}

}  // namespace tessera::internal
