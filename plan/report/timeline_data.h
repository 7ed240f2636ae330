#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string_view>
#include <vector>

#include <tessera/plan/measured_step.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// The content of timeline_page.html. Its script inserts data only as text, and never as markup.
extern const std::string_view kTimelineHtml;

// These functions return JSON for the timeline page.

// Returns a predicted step's lanes: [{"lane", "intervals": [{"name", "begin_ms", "end_ms", "backward", "operators"}]}].
// Omits empty lanes. Merges adjacent operators of one unit and direction. Keeps the 2000 longest intervals of a lane.
nlohmann::json lanes_of(const StepTime& time);

// Returns {"total_ms", "wait_ms", "steps", "lanes", "differences": [{"name", "predicted_ms", "measured_ms",
// "is_large"}]}. "lanes" has the format of lanes_of(). Compares collectives, waits, and compute without waits, by unit
// and direction. "differences" has the 12 largest, sorted. "is_large" is true above a twentieth of the measured step.
nlohmann::json measured_time_of(const StepTime& predicted, const MeasuredStep& measured);

// Returns {"peak", "points", "differences": [{"begin", "end", "name", "text"}], "other_at"}. "other_at" is the index of
// the first operator that differs, or -1. Points and differences are of earlier operators. "points" has the measured
// bytes after the operators of `points`. A difference is a range of operators after which bytes differ.
nlohmann::json measured_memory_of(const RunRecord& predicted, const RunRecord& measured,
                                  const std::vector<size_t>& points);

}  // namespace tessera::internal
