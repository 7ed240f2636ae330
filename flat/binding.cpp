#include "tessera/flat/binding.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <sstream>
#include <stdexcept>
#include <utility>

namespace tessera {
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

void require_known(const torch::nn::Module& module, const std::string& prefix,
                   const std::unordered_set<const c10::TensorImpl*>& known, const std::string& who) {
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
    if (!parameter.defined() || known.contains(parameter.unsafeGetTensorImpl())) continue;
    for (const auto& entry : module.named_parameters(/*recurse=*/false))
      if (entry.value().is_same(parameter))
        throw std::logic_error("parameter '" + prefix + entry.key() +
                               "' was registered after the module was wrapped by " + who +
                               ", which does not train it: add it before wrapping");
  }
  for (const auto& child : module.named_children())
    require_known(*child.value(), prefix + child.key() + ".", known, who);
}

bool knows_all(const torch::nn::Module& module, const std::unordered_set<const c10::TensorImpl*>& known) {
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false))
    if (parameter.defined() && !known.contains(parameter.unsafeGetTensorImpl())) return false;
  for (const auto& child : module.children())
    if (!knows_all(*child, known)) return false;
  return true;
}

}  // namespace

Binding::Binding(std::shared_ptr<torch::nn::Module> module, std::vector<PlannedParameter> parameters, std::string who,
                 int rank)
    : module_(std::move(module)),
      parameters_(std::move(parameters)),
      who_(std::move(who)),
      rank_(rank),
      accumulators_(parameters_.size()) {
  for (const PlannedParameter& parameter : parameters_)
    kinds_.push_back({parameter.tensor.scalar_type(), parameter.tensor.sizes().vec(), parameter.tensor.device()});
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

void Binding::require_nothing_new() const {
  if (!knows_all(*module_, known_)) require_known(*module_, "", known_, who_);
}

std::string Binding::label(size_t parameter) const {
  return "parameter '" + parameters_[parameter].fqn + "' on rank " + std::to_string(rank_);
}

void Binding::require_same_kind(size_t parameter) const {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  const Kind& kind = kinds_[parameter];
  if (tensor.scalar_type() == kind.dtype && tensor.sizes() == at::IntArrayRef(kind.sizes) &&
      tensor.device() == kind.device)
    return;
  std::ostringstream text;
  text << label(parameter) << " is " << tensor.scalar_type() << " " << tensor.sizes() << " on " << tensor.device()
       << " now, but was " << kind.dtype << " " << at::IntArrayRef(kind.sizes) << " on " << kind.device << " when "
       << who_ << " wrapped the module: move and convert a module before it is wrapped";
  throw std::logic_error(text.str());
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

}  // namespace tessera
