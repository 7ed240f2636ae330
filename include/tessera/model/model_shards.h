#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/range.h>

namespace tessera {

// What this rank holds of one parameter of a model.
struct NamedShard {
  std::string fqn;                   // the first name that the module registers it under
  std::vector<std::string> aliases;  // its further names (tied weights)
  std::vector<int64_t> sizes;        // of the whole parameter
  std::vector<int64_t> strides;      // of the whole parameter: the order of its elements in memory
  Range held;                        // the part that is here, in elements in memory order
  // The leaf that optimizers are given: [held.numel()], or the parameter in its own shape where ranks hold it whole.
  // Writing to it under NoGradGuard changes the model.
  at::Tensor tensor;
  // Of the ranks that hold this very part, which one is this: 0 to replica_count - 1.
  int replica = 0;
  int replica_count = 1;
};

// What a rank holds of one parameter.
struct HeldPart {
  Range range;      // in elements in memory order
  int replica = 0;  // NamedShard::replica
};

// How a wrapper shows the state of its model to code that does not know it (checkpoints, say): by the module's own
// names, wherever the parts may lie. Nothing here is collective.
class ModelShards {
 public:
  virtual ~ModelShards() = default;
  // The group that the model is trained by.
  virtual const std::shared_ptr<Communicator>& comm() const = 0;
  // Every parameter once, in the module's order, the same list of names on every rank.
  virtual std::vector<NamedShard> named_shards() const = 0;
  // The same for who saves them: their values are what the module shows now, where a scope or other data given to its
  // parameters has changed that. Throws std::logic_error, naming the unit, where those changes are not to stay, and,
  // naming the parameter, for one that the module has got since it was wrapped.
  virtual std::vector<NamedShard> shards_to_save() const { return named_shards(); }
  // What any rank of comm() holds of each of named_shards(), computed and not asked for. Throws std::logic_error where
  // parameters are cut and the wrapper has not said how.
  virtual std::vector<HeldPart> held_by(int rank) const;
  // The leaves of named_shards(): what an optimizer is given.
  std::vector<at::Tensor> parameters() const;
  // The same by their first names.
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  // Clears their gradients: optimizer.zero_grad() does it too.
  void zero_grad(bool set_to_none = true);

  // The module's buffers, whole on every rank, under each of their names.
  virtual torch::OrderedDict<std::string, at::Tensor> named_buffers() const = 0;
};

namespace internal {

// An optimizer whose groups are the whole model's and whose state() is that of the parameters which this rank owns.
class OptimizerShards {
 public:
  virtual ~OptimizerShards() = default;
  // What it steps those with, to learn of what class it is.
  virtual const torch::optim::Optimizer& local() const = 0;
  // Whether this rank owns the parameter and keeps its state.
  virtual bool owns(const at::Tensor& parameter) const = 0;
  // What this rank has of a parameter after a step that leaves `values` at its owner: rounded ones, where they travel
  // so.
  virtual at::Tensor as_received(const at::Tensor& /*parameter*/, const at::Tensor& values) const { return values; }
};

}  // namespace internal

}  // namespace tessera
