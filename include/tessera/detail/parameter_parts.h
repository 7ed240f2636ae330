#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include <tessera/model_shards.h>

namespace tessera {

// What an optimizer that looks beyond single elements knows of the tensors that it was given: which parts they are of
// which parameters, and who has the others.
class ParameterParts {
 public:
  // They are whole, and there are no others.
  ParameterParts() = default;
  // They are the wrapper's. Collective over model.comm(): one small all-gather.
  explicit ParameterParts(const ModelShards& model);

  // Throws std::invalid_argument, for `optimizer` by name, for a tensor that is none of the wrapper's parameters(), or,
  // without a wrapper, is a shard: its results would be those of another parameter. With a wrapper it is collective,
  // and throws on all ranks if they have other groups, of other options or in another order.
  void require_known(const std::vector<torch::optim::OptimizerParamGroup>& groups, const char* optimizer) const;

  // One of the parameters; a whole one, without a wrapper, has no name. Of one that is here whole with the strides that
  // it has now: set_data() may have changed them.
  NamedShard of(const at::Tensor& parameter) const;
  // By rank, which part of the parameter it has, and of which copy of the model; empty without a wrapper.
  struct Held {
    Range range;
    int copy = 0;
  };
  const std::vector<Held>& by_rank(const at::Tensor& parameter) const;

  // The wrapper's group; null without a wrapper.
  Communicator* comm() const { return comm_.get(); }
  // Whether parameters may be cut: FullyShardedDataParallel's on more than one rank. The same on all ranks.
  bool are_cut() const { return are_cut_; }
  // Whether sums over ranks are to count this rank's part: copies of a part count once.
  bool counts(const at::Tensor& parameter) const { return !are_cut_ || of(parameter).replica == 0; }

  // For each, whether it has a gradient, on any rank: ranks with no element of a parameter may not know. Collective
  // where parameters are cut: one small all-reduce.
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

// A dense tensor's elements in the order of memory, [numel], as a view.
at::Tensor in_memory_order(const at::Tensor& dense);

// `tensor`, or a copy of it in these strides, of the same dtype and on the same device.
at::Tensor in_strides(const at::Tensor& tensor, at::IntArrayRef strides);

// The optimizer's add_param_group() as libtorch has it, taken back where `check` throws.
template <class Check>
void add_checked_group(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group,
                       Check check) {
  optimizer.add_param_group(group);
  try {
    check();
  } catch (...) {
    optimizer.param_groups().pop_back();
    throw;
  }
}

}  // namespace tessera
