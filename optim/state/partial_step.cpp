#include <tessera/optim/partial_step.h>

#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>

#include <stdexcept>
#include <typeinfo>
#include <unordered_set>

#include <tessera/optim/fused_optimizers.h>
#include <tessera/optim/host_adam.h>

namespace tessera::internal {
namespace {

template <class Optimizer>
bool is_derived_from(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const Optimizer*>(&optimizer) != nullptr && typeid(optimizer) != typeid(Optimizer);
}

}  // namespace

bool may_have_own_step(const torch::optim::Optimizer& optimizer) {
  return is_derived_from<Adam>(optimizer) || is_derived_from<AdamW>(optimizer) || is_derived_from<SGD>(optimizer) ||
         is_derived_from<HostAdam>(optimizer) || is_derived_from<HostAdamW>(optimizer);
}

ChosenStep* chosen_step_of(torch::optim::Optimizer& optimizer) {
  return may_have_own_step(optimizer) ? nullptr : dynamic_cast<ChosenStep*>(&optimizer);
}

void for_each_stepped(
    torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
    const std::function<void(torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter)>& take) {
  std::unordered_set<const c10::TensorImpl*> wanted, found;
  if (chosen != nullptr)
    for (const at::Tensor& parameter : *chosen) wanted.insert(parameter.unsafeGetTensorImpl());
  for (auto& group : optimizer.param_groups()) {
    if (const auto &own = group.options(), &usual = optimizer.defaults(); typeid(own) != typeid(usual))
      throw std::invalid_argument(c10::demangle(typeid(usual).name()) + ": a group has options of another optimizer");
    for (const at::Tensor& parameter : group.params()) {
      if (chosen != nullptr && !wanted.contains(parameter.unsafeGetTensorImpl())) continue;
      if (chosen != nullptr) found.insert(parameter.unsafeGetTensorImpl());
      if (parameter.grad().defined()) take(group, parameter);
    }
  }
  if (found.size() < wanted.size())
    throw std::invalid_argument(c10::str("step_parameters: ", wanted.size() - found.size(), " of ", chosen->size(),
                                         " tensors are no parameters of the optimizer"));
}

}  // namespace tessera::internal
