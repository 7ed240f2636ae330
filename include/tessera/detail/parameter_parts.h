#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include <tessera/model/model_shards.h>

namespace tessera::internal {

// Knows for each tensor of an optimizer the parameter to which it belongs, and the ranks that hold the parameter's
// other parts. For optimizers that are not elementwise.
class ParameterParts {
 public:
  ParameterParts() = default;  // without a wrapper: every tensor is a whole parameter
  // With a wrapper: every tensor must be in model.parameters(). Collective over model.comm(): one small all-gather.
  explicit ParameterParts(const ModelShards& model);

  // Without a wrapper, throws std::invalid_argument for a shard. With a wrapper, the call is collective, and throws
  // std::invalid_argument for a tensor that is not in the wrapper's parameters(). It also throws, on all ranks, if
  // groups, options or their order differ between ranks. Errors name `optimizer`.
  void require_known(const std::vector<torch::optim::OptimizerParamGroup>& groups, const char* optimizer) const;

  // Returns this rank's part of a parameter. A whole parameter has its current strides, which set_data() may have
  // changed. Without a wrapper, returns the whole parameter, unnamed; with one, throws std::invalid_argument for an
  // unknown tensor.
  NamedShard of(const at::Tensor& parameter) const;
  // A rank's range of a parameter's elements, and the index of the rank's copy of the model. by_rank() has one entry
  // for each rank, in rank order. Without a wrapper, by_rank() is empty.
  struct Held {
    Range range;
    int copy = 0;
  };
  const std::vector<Held>& by_rank(const at::Tensor& parameter) const;

  Communicator* comm() const { return comm_.get(); }  // the wrapper's group; null without a wrapper
  // Returns whether parameters may be sharded (FullyShardedDataParallel on more than one rank). Equal on all ranks.
  bool are_cut() const { return are_cut_; }
  // Returns whether this rank adds its part to a sum. Each rank sums whole parameters by itself; of sharded parameters,
  // only replica 0 adds its parts to the sum over ranks.
  bool counts(const at::Tensor& parameter) const { return !are_cut_ || of(parameter).replica == 0; }

  // Returns for each parameter whether any rank has a gradient. A rank that holds no elements of a parameter may have
  // no gradient, although other ranks have one. Collective if parameters are sharded: one small all-reduce.
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

// Returns a dense tensor's elements in memory order, as a 1-D view: [numel].
at::Tensor in_memory_order(const at::Tensor& dense);

// Returns `tensor` if it has these strides, otherwise a copy that has them. Dtype and device are unchanged.
at::Tensor in_strides(const at::Tensor& tensor, at::IntArrayRef strides);

// Sets the options of groups[first + i] to those of added[i], because libtorch 2.15 replaces options of classes other
// than its own by the defaults. Options of libtorch's own classes stay as libtorch merged them.
void restore_options(std::vector<torch::optim::OptimizerParamGroup>& groups, size_t first,
                     const std::vector<torch::optim::OptimizerParamGroup>& added);

// Removes repeated entries of a parameter from its group, so that a step updates the parameter once. Repetitions occur
// because a module's parameters() lists a tied weight under each of its names. Throws std::invalid_argument, naming
// `optimizer`, if a parameter is in two groups.
void list_once(std::vector<torch::optim::OptimizerParamGroup>& groups, const char* optimizer);

// Calls libtorch's add_param_group(), then check(). If check() throws, removes the group and rethrows.
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
