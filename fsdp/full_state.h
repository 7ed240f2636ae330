#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/options/fsdp_options.h>
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Calls visit() for each parameter in full, then for each buffer, in the parameters' own dtypes. Units that are pinned
// are shown as they are now. Collective; one unit at a time is gathered.
using VisitState =
    std::function<void(const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor)>;
void visit_full_state(ShardedModel& model, const VisitState& visit, const StateDictOptions& options);

}  // namespace tessera::internal
