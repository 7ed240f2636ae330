#pragma once

#include <nlohmann/json_fwd.hpp>

#include <tessera/plan/step_time.h>

namespace tessera::internal {

// Returns a step's lanes for a page: [{"lane", "intervals": [{"name", "begin_ms", "end_ms", "backward",
// "operators"}]}], without empty lanes. Merges consecutive operators of one unit. Keeps the longest intervals of each
// lane, at most kMostDrawn.
inline constexpr size_t kMostDrawn = 2000;
nlohmann::json lanes_of(const StepTime& time);

}  // namespace tessera::internal
