#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/layout/as_wrapped.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// What a wrapper knows of its module's parameters: the tensors that were wrapped, and the autograd nodes that carry
// its hooks. The one place that looks for what the user has done to them since. Used by one thread at a time.
//
// torch::load(), module.to(), set_data() and changes of dtype make autograd forget a parameter's gradient accumulator,
// and with it the hook, without a word; so hook() is called wherever gradients may come next, and hooks anew.
class Binding {
 public:
  // `who` and `rank` are for errors. All parameters that the module has now are known, also those not listed.
  Binding(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters, std::string who,
          int rank);

  const std::vector<PlannedParameter>& parameters() const { return parameters_; }
  const at::Tensor& tensor(size_t parameter) const { return parameters_[parameter].tensor; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

  // Sees each gradient before autograd accumulates it, on the engine's thread, and returns what autograd is to
  // accumulate: undefined for nothing.
  using Take = std::function<at::Tensor(size_t parameter, const at::Tensor& gradient)>;
  void set_take(Take take) { take_ = std::move(take); }

  // Hooks a parameter that requires a gradient and does not carry our hook; not inside a backward that reaches it.
  void hook(size_t parameter);
  void hook_all();

  // Throws std::logic_error, naming it, if the module has a parameter that it did not have when it was wrapped.
  void require_nothing_new() const;

  // Throws std::logic_error if a parameter is no longer of the dtype, shape or device that it was wrapped with.
  void require_same_kind(size_t parameter) const;

  // Throws std::logic_error if the parameter has a hook for when its gradient has been accumulated
  // (set_post_acc_grad_hooks(), or add_post_hook() of its accumulator), where set_take() leaves nothing to see.
  void require_no_hook_after(size_t parameter) const;

  // "parameter 'fc.weight' on rank 1"
  std::string label(size_t parameter) const;

  // Values as of the last note_versions() of parameters, to find operators of a forward that change them.
  void note_versions();
  // Throws std::logic_error that names the first parameter changed since (an Embedding with max_norm, say).
  void require_same_versions(const char* during) const;

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  const std::shared_ptr<torch::nn::Module> module_;
  const std::vector<PlannedParameter> parameters_;
  const std::string who_;
  const int rank_;
  std::vector<WrappedKind> kinds_;
  std::unordered_set<const c10::TensorImpl*> known_;
  Take take_;
  std::vector<Accumulator> accumulators_;  // autograd itself holds them only weakly
  std::vector<int64_t> versions_;
};

}  // namespace tessera::internal
