#include "core/gradients/binding.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <stdexcept>

namespace tessera::internal {
namespace {

class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(size_t parameter, Binding::Take take) : parameter_(parameter), take_(std::move(take)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    return {take_(parameter_, gradients.at(0))};
  }

 private:
  const size_t parameter_;
  const Binding::Take take_;
};

// Returns the name of the first parameter below `module` that is not in `known`, or "".
std::string unknown_parameter(const torch::nn::Module& module,
                              const std::unordered_set<const c10::TensorImpl*>& known) {
  for (const auto& entry : module.named_parameters(/*recurse=*/false))
    if (entry.value().defined() && !known.contains(entry.value().unsafeGetTensorImpl())) return entry.key();
  for (const auto& child : module.named_children())
    if (const std::string name = unknown_parameter(*child.value(), known); !name.empty())
      return child.key() + "." + name;
  return "";
}

}  // namespace

Binding::Binding(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters, std::string who,
                 int rank)
    : module_(std::move(module)),
      parameters_(std::move(parameters)),
      who_(std::move(who)),
      rank_(rank),
      accumulators_(parameters_.size()) {
  for (const PlannedParameter& parameter : parameters_) kinds_.push_back(TensorSignature::of(parameter.tensor));
  for (const at::Tensor& parameter : module_->parameters())
    if (parameter.defined()) known_.insert(parameter.unsafeGetTensorImpl());
}

void Binding::hook(size_t parameter) {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  if (!tensor.requires_grad()) return;
  if (accumulators_[parameter] && torch::autograd::impl::try_get_grad_accumulator(tensor) == accumulators_[parameter])
    return;
  at::AutoGradMode recording(true);
  accumulators_[parameter] = torch::autograd::impl::grad_accumulator(tensor);
  accumulators_[parameter]->add_pre_hook(std::make_unique<GradientHook>(parameter, take_));
}

void Binding::hook_all() {
  for (size_t i = 0; i < parameters_.size(); ++i) hook(i);
}

void Binding::move_hooks_to_current_stream() {
  hook_all();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].tensor.requires_grad()) continue;
    accumulators_[i]->clear_input_metadata();
    accumulators_[i]->add_input_metadata(parameters_[i].tensor);
  }
}

void Binding::require_nothing_new() const {
  if (const std::string name = unknown_parameter(*module_, known_); !name.empty())
    throw std::logic_error("parameter '" + name + "' was registered after the module was wrapped by " + who_ +
                           ", which does not train it: add it before wrapping");
}

std::string Binding::label(size_t parameter) const {
  return "parameter '" + parameters_[parameter].fqn + "' on rank " + std::to_string(rank_);
}

void Binding::require_same_kind(size_t parameter) const {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  const TensorSignature& kind = kinds_[parameter];
  if (kind.is_of(tensor)) return;
  throw std::logic_error(label(parameter) + " " + kind.change_of(tensor) + " when " + who_ +
                         " wrapped the module: move and convert a module before it is wrapped");
}

void Binding::require_no_hook_after(size_t parameter) const {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta->post_acc_grad_hooks_ == nullptr && accumulators_[parameter]->post_hooks().empty()) return;
  throw std::logic_error(label(parameter) +
                         " has a hook that runs when its gradient has been accumulated, which is before ranks have "
                         "averaged it: do after backward what the hook does, or take a hook of register_hook()");
}

void Binding::note_versions() {
  versions_.clear();
  for (const PlannedParameter& parameter : parameters_) versions_.push_back(parameter.tensor._version());
}

void Binding::require_same_versions(const char* during) const {
  for (size_t i = 0; i < versions_.size(); ++i)
    if (parameters_[i].tensor._version() != versions_[i])
      throw std::logic_error(
          label(i) + " was changed during " + during +
          " (by an Embedding with max_norm, say), by what this rank alone has seen: the ranks' copies "
          "would drift apart, so change parameters between steps, alike on all ranks");
}

}  // namespace tessera::internal
