#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optim/state/optimizer_state.h"

namespace tessera {

// An optimizer's state, as Python's optimizer.state_dict(): parameters are known by their place in
// the groups, counted through all of them.
struct OptimizerStateDict {
  struct Group {
    OptionList options;
    int64_t parameter_count = 0;
  };
  std::string kind;  // "Adam"; see optimizer_kind()
  std::vector<Group> groups;
  std::map<int64_t, ParameterState> state;  // of the parameters that have any; whole, in their shapes

  // Parameters of all groups.
  int64_t parameter_count() const;
};

// The dictionary without states: groups and options as they are now.
OptimizerStateDict describe_groups(const torch::optim::Optimizer& optimizer);

// Checks that the dictionary fits the optimizer: kind, groups, their lengths, and the states' shapes.
// Throws std::invalid_argument that lists everything that does not.
void require_matching(const OptimizerStateDict& dict, const torch::optim::Optimizer& optimizer);

}  // namespace tessera
