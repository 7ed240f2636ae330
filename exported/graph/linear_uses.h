#pragma once

#include <vector>

#include "exported/graph/graph.h"

namespace tessera::internal {

// For each tensor of Execution::state: whether the graph, with the graphs inside it, has it as the weight of
// aten.linear and uses it for nothing else.
std::vector<bool> used_by_linear_alone(const Graph& graph, size_t state_count);

}  // namespace tessera::internal
