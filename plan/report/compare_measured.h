#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include <tessera/plan/measured_step.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// Data for a page that compares a real run with the predicted one.

// Returns {"total_ms", "wait_ms", "steps", "lanes": as lanes_of(), "differences": [{"name", "predicted_ms",
// "measured_ms", "is_large"}]}. Differences are of compute by unit and direction without its waits, of collectives, and
// of waits; at most 12, the largest first. A large one exceeds a twentieth of the step.
nlohmann::json measured_time_of(const StepTime& predicted, const MeasuredStep& measured);

// Returns {"peak", "points": bytes at those operators, "differences": [{"begin", "end", "name", "text"}], "other_at"}.
// A difference is a stretch of operators after which bytes of some kind differ; "other_at" is the first operator that
// differs, or -1.
nlohmann::json measured_memory_of(const RunRecord& predicted, const RunRecord& measured,
                                  const std::vector<size_t>& points);

}  // namespace tessera::internal
