#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/options/fsdp_options.h>
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Calls visit() for each full parameter in its own dtype, then for each buffer. Summoned units are shown with their
// changes. Collective; at most one unit is gathered at a time.
using VisitState =
    std::function<void(const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor)>;
void visit_full_state(ShardedModel& model, const VisitState& visit, const StateDictOptions& options);

}  // namespace tessera::internal
