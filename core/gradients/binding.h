#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/layout/tensor_signature.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Returns a callback that may outlive the object of `weak`. The callback calls `call(object, ...)` while the object
// exists, and `gone(...)` after the object's destruction.
template <class Object, class Call, class Gone>
auto while_alive(std::weak_ptr<Object> weak, Call call, Gone gone) {
  return [weak = std::move(weak), call = std::move(call), gone = std::move(gone)](const auto&... arguments) {
    const auto object = weak.lock();
    return object ? call(*object, arguments...) : gone(arguments...);
  };
}

// The parameters of a wrapped module, and the autograd nodes that carry the wrapper's hooks. Detects changes that the
// user makes to the parameters after wrapping. Used by one thread at a time.
//
// torch::load(), module.to(), set_data() and changes of dtype make autograd drop a parameter's gradient accumulator
// with its hook. hook() then adds a new hook. So hook() must be called before each forward that records a graph.
class Binding {
 public:
  // `who` (the wrapper's name) and `rank` are for errors. require_nothing_new() accepts only parameters that exist now.
  Binding(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters, std::string who,
          int rank);

  const std::vector<PlannedParameter>& parameters() const { return parameters_; }
  const at::Tensor& tensor(size_t parameter) const { return parameters_[parameter].tensor; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

  // A callback that receives each gradient on the engine's thread, before autograd accumulates the gradient. Returns
  // the tensor that autograd must accumulate instead; undefined: none. set_take() must be called before hook().
  using Take = std::function<at::Tensor(size_t parameter, const at::Tensor& gradient)>;
  void set_take(Take take) { take_ = std::move(take); }

  // Adds a hook if the parameter requires a gradient and has no hook of this object. Must not be called in a backward.
  void hook(size_t parameter);
  void hook_all();
  // Makes autograd run the hooks on the current stream of each parameter's device. By default a hook runs on the stream
  // of its creation: often the default stream, which cannot be captured. Must not be called in a backward.
  void move_hooks_to_current_stream();

  // Throws std::logic_error, naming the parameter, if a parameter was added to the module after it was wrapped.
  void require_nothing_new() const;

  // Throws std::logic_error if the parameter's dtype, shape or device has changed since it was wrapped.
  void require_same_kind(size_t parameter) const;

  // Throws std::logic_error if the user added a hook with set_post_acc_grad_hooks() or add_post_hook(). Such a hook
  // would run after the gradient is accumulated, but before it is averaged over ranks.
  void require_no_hook_after(size_t parameter) const;

  // Returns the wrapper and the rank, for errors: "DistributedDataParallel on rank 1".
  std::string owner() const { return who_ + " on rank " + std::to_string(rank_); }
  // Returns the name of a parameter, for errors: "parameter 'fc.weight' on rank 1".
  std::string label(size_t parameter) const;

  // Records the version of each parameter, to detect operators in forward that change a parameter.
  void note_versions();
  // Throws std::logic_error, naming the parameter, if a parameter was changed after note_versions(), for example by an
  // Embedding with max_norm. `during` is for the error.
  void require_same_versions(const char* during) const;

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  const std::shared_ptr<torch::nn::Module> module_;
  const std::vector<PlannedParameter> parameters_;
  const std::string who_;
  const int rank_;
  std::vector<TensorSignature> kinds_;
  std::unordered_set<const c10::TensorImpl*> known_;
  Take take_;
  std::vector<Accumulator> accumulators_;  // keeps the accumulators alive: autograd has only weak references to them
  std::vector<int64_t> versions_;
};

}  // namespace tessera::internal
