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

// The part of one parameter of a model that this rank holds.
struct NamedShard {
  std::string fqn{};                   // first registered name of the parameter
  std::vector<std::string> aliases{};  // other names of the parameter (tied weights)
  std::vector<int64_t> sizes{};        // sizes of the whole parameter
  std::vector<int64_t> strides{};      // strides of the whole parameter in memory
  Range held{};                        // the range of elements on this rank, in memory order
  // The leaf tensor for optimizers: [held.numel()], or the parameter's own shape if every rank holds the whole
  // parameter. Writing to it under NoGradGuard changes the model.
  at::Tensor tensor{};
  // The index of this rank among the ranks that hold this part: 0 to replica_count - 1.
  int replica = 0;
  int replica_count = 1;
};

// The state of a wrapped model under the module's own names, for code that is independent of the wrapper (checkpoints).
// No function is collective.
class ModelShards {
 public:
  // The part of one parameter that a rank holds.
  struct HeldPart {
    Range range{};    // range of elements in memory order
    int replica = 0;  // see NamedShard::replica
  };

  virtual ~ModelShards() = default;
  virtual const std::shared_ptr<Communicator>& comm() const = 0;  // the group that trains the model
  // Returns every parameter once, in the module's order, with the same names on every rank.
  virtual std::vector<NamedShard> named_shards() const = 0;
  // Returns the shards to save. They have the module's current values, which summon_full_params() or set_data() may
  // have changed. Throws std::logic_error, naming the unit, if a scope with SummonOptions::writeback = false will drop
  // changes. Also throws it, naming the parameter, if a parameter was registered after wrapping.
  virtual std::vector<NamedShard> shards_to_save() const { return named_shards(); }
  // Returns the part of each of named_shards() that rank `rank` of comm() holds. Does not communicate. Throws
  // std::logic_error if parameters are sharded and the wrapper does not override this function.
  virtual std::vector<HeldPart> held_by(int rank) const;
  std::vector<at::Tensor> parameters() const;  // the leaf tensors of named_shards(), for an optimizer
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;  // keyed by NamedShard::fqn
  void zero_grad(bool set_to_none = true);  // clears the gradients of parameters(), like optimizer.zero_grad()

  // Returns the module's buffers, whole on every rank, under each of their names.
  virtual torch::OrderedDict<std::string, at::Tensor> named_buffers() const = 0;
};

// Returns the shape of the whole parameter if the tensor is in a wrapper's parameters(), otherwise the tensor's own
// shape. Code that selects parameters by dimension must use this function instead of dim(), because shards of
// FullyShardedDataParallel have one dimension. Not collective.
std::vector<int64_t> whole_sizes(const at::Tensor& parameter);

namespace internal {

// An optimizer with the groups of the whole model, whose state() has only the states of parameters that this rank owns.
class OptimizerShards {
 public:
  virtual ~OptimizerShards() = default;
  // Returns the optimizer that steps the owned parameters. Callers inspect its class.
  virtual const torch::optim::Optimizer& local() const = 0;
  virtual bool owns(const at::Tensor& parameter) const = 0;  // whether this rank owns the parameter and its state
  // Returns an owner's new `values` of a parameter as this rank receives them: rounded if OSS publishes rounded values.
  virtual at::Tensor as_received(const at::Tensor& /*parameter*/, const at::Tensor& values) const { return values; }
};

}  // namespace internal

}  // namespace tessera
