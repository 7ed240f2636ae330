#include <tessera/optim/optimizer_state_dict.h>

#include <sstream>
#include <stdexcept>

#include "optim/state/optimizer_state.h"

namespace tessera {
using namespace internal;

int64_t OptimizerStateDict::parameter_count() const {
  int64_t count = 0;
  for (const Group& group : groups) count += group.parameter_count;
  return count;
}

OptimizerStateDict internal::describe_groups(const torch::optim::Optimizer& optimizer) {
  OptimizerStateDict dict{optimizer_kind(optimizer), {}, {}};
  for (const auto& group : optimizer.param_groups())
    dict.groups.push_back({read_options(group.options()), static_cast<int64_t>(group.params().size())});
  return dict;
}

void internal::require_matching(const OptimizerStateDict& dict, const torch::optim::Optimizer& optimizer) {
  const OptimizerStateDict own = describe_groups(optimizer);
  std::ostringstream problems;
  if (dict.kind != own.kind) problems << "\n  it is of " << dict.kind << ", expected " << own.kind;
  if (dict.groups.size() != own.groups.size())
    problems << "\n  it has " << dict.groups.size() << " groups, expected " << own.groups.size();
  for (size_t i = 0; i < std::min(dict.groups.size(), own.groups.size()); ++i)
    if (dict.groups[i].parameter_count != own.groups[i].parameter_count)
      problems << "\n  group " << i << " has " << dict.groups[i].parameter_count << " parameters, expected "
               << own.groups[i].parameter_count;
  if (problems.str().empty()) {
    std::vector<at::Tensor> parameters;
    for (const auto& group : optimizer.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    for (const auto& [index, state] : dict.state) {
      if (index < 0 || index >= dict.parameter_count()) {
        problems << "\n  it has a state for parameter " << index << ", expected 0 to " << dict.parameter_count() - 1;
        continue;
      }
      for (const auto& [name, tensor] : state.tensors)
        if (const auto sizes = state_sizes(name, parameters[index].sizes().vec()); tensor.sizes() != sizes)
          problems << "\n  " << name << " of parameter " << index << " has shape " << tensor.sizes() << ", expected "
                   << at::IntArrayRef(sizes);
    }
  }
  if (!problems.str().empty())
    throw std::invalid_argument("the optimizer's state dictionary does not fit:" + problems.str());
}

}  // namespace tessera
