#pragma once

#include <vector>

#include "exported/graph/graph.h"

namespace tessera::internal {

// Returns one flag for each tensor of Execution::state. The flag is true if the graph and its nested graphs use the
// tensor only as the weight of aten.linear.
std::vector<bool> used_by_linear_alone(const Graph& graph, size_t state_count);

}  // namespace tessera::internal
