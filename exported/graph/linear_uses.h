#pragma once

#include <vector>

#include "exported/graph/graph.h"

namespace tessera::internal {

// Returns, for each tensor of Execution::state, whether the graph and its nested graphs use it only as the weight of
// aten.linear.
std::vector<bool> used_by_linear_alone(const Graph& graph, size_t state_count);

}  // namespace tessera::internal
