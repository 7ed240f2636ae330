#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include <tessera/plan/measured_step.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// What a page draws of a real run beside a predicted one.

// {"total_ms", "wait_ms", "steps", "lanes": as lanes_of(), "differences": [{"name", "predicted_ms", "measured_ms",
// "is_large"}]}. Differences are of compute by unit and direction, less the waits in it, of collectives and of waits,
// the largest first, at most 12; a large one is of more than a twentieth of the step.
nlohmann::json measured_time_of(const StepTime& predicted, const MeasuredStep& measured);

// {"peak", "points": bytes at those operators, "differences": [{"begin", "end", "name", "text"}], "other_at"}: where
// bytes of any kind are not the same after the same operator, in stretches; "other_at" is the first operator that is
// another one, or -1.
nlohmann::json measured_memory_of(const RunRecord& predicted, const RunRecord& measured,
                                  const std::vector<size_t>& points);

}  // namespace tessera::internal
