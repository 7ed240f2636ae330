#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optim/state/optimizer_state.h"

namespace tessera {

// An optimizer's state, like Python's optimizer.state_dict(). The key of a parameter is its index, counted through all
// groups.
struct OptimizerStateDict {
  struct Group {
    OptionList options;
    int64_t parameter_count = 0;
  };
  std::string kind;  // "Adam"; see optimizer_kind()
  std::vector<Group> groups;
  std::map<int64_t, ParameterState> state;  // of parameters with a state; whole tensors

  // Returns the number of parameters in all groups.
  int64_t parameter_count() const;
};

// Returns the dictionary without states: current groups and options.
OptimizerStateDict describe_groups(const torch::optim::Optimizer& optimizer);

// Checks that the dictionary fits the optimizer: kind, groups, their lengths, shapes of states. Throws
// std::invalid_argument that lists every mismatch.
void require_matching(const OptimizerStateDict& dict, const torch::optim::Optimizer& optimizer);

}  // namespace tessera
