#pragma once

#include <nlohmann/json_fwd.hpp>

#include <tessera/plan/step_time.h>

namespace tessera::internal {

// A step's lanes as a page draws them: [{"lane", "intervals": [{"name", "begin_ms", "end_ms", "backward",
// "operators"}]}], lanes without intervals left out. Operators that follow each other in one unit are one interval. Of
// many intervals the longest of each lane are kept, kMostDrawn at most.
inline constexpr size_t kMostDrawn = 2000;
nlohmann::json lanes_of(const StepTime& time);

}  // namespace tessera::internal
