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
// "measured_ms", "is_large"}]}. Compares compute by unit and direction (without waits), collectives, and waits. Returns
// the 12 largest differences, the largest first. A large one exceeds a twentieth of the step.
nlohmann::json measured_time_of(const StepTime& predicted, const MeasuredStep& measured);

// Returns {"peak", "points": measured bytes after the operators `points`, "differences": [{"begin", "end", "name",
// "text"}], "other_at"}. A difference is a range of operators after which the bytes of a kind differ. "other_at" is the
// index of the first operator with another name, or -1.
nlohmann::json measured_memory_of(const RunRecord& predicted, const RunRecord& measured,
                                  const std::vector<size_t>& points);

}  // namespace tessera::internal
