#include "tessera/optim/partial_step.h"

#include <typeinfo>

#include "tessera/optim/fused_optimizers.h"
#include "tessera/optim/host_adam.h"

namespace tessera {
namespace {

template <class Optimizer>
bool is_derived_from(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const Optimizer*>(&optimizer) != nullptr && typeid(optimizer) != typeid(Optimizer);
}

}  // namespace

ChosenStep* chosen_step_of(torch::optim::Optimizer& optimizer) {
  if (is_derived_from<Adam>(optimizer) || is_derived_from<AdamW>(optimizer) || is_derived_from<SGD>(optimizer) ||
      is_derived_from<HostAdam>(optimizer) || is_derived_from<HostAdamW>(optimizer))
    return nullptr;
  return dynamic_cast<ChosenStep*>(&optimizer);
}

}  // namespace tessera
