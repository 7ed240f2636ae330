#pragma once

#include <nlohmann/json_fwd.hpp>

#include <tessera/plan/step_time.h>

namespace tessera::internal {

// Returns a step's lanes as JSON for a page: [{"lane", "intervals": [{"name", "begin_ms", "end_ms", "backward",
// "operators"}]}]. Omits empty lanes. Merges consecutive operators of one unit. If a lane has more than kMostDrawn
// intervals, keeps only the longest.
inline constexpr size_t kMostDrawn = 2000;
nlohmann::json lanes_of(const StepTime& time);

}  // namespace tessera::internal
