#pragma once

#include <cstdint>
#include <string>

#include <tessera/plan/measured_step.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera {

// The texts and optional inputs of timeline_page().
struct TimelinePageText {
  std::string title{};             // title and first line of the page
  std::string options{};           // text below the title, such as the training options
  std::string notes{};             // preformatted lines below the picture, such as a table of choices
  int64_t memory_bytes = 0;        // a rank's memory, drawn as a line; 0: not drawn
  const StepTime* time = nullptr;  // predicted time of a step, drawn in lanes below the memory; null: unknown
  // The record of a real run (record_run()) with the same constructor and steps, or null. The page draws the bytes of
  // this record as a second line, and marks differences.
  const RunRecord* measured = nullptr;
  // A step of the measured run's trace, or null. The page draws this step in lanes below those of `time`, and lists the
  // largest differences. Ignored if `time` is null.
  const MeasuredStep* measured_time = nullptr;
};

// Returns a self-contained HTML page (UTF-8) that draws a run. The page has the bytes by kind over all operators, the
// content and place of the peak, and the collectives below the bytes. It shows name, unit, module and bytes of the
// operator under the pointer. If the time is known, it also draws a step's compute by unit, and its collectives, over
// milliseconds. Divides the operators into at most 2,000 ranges, and shows the operator with the most bytes of each
// range. Names may contain any text.
std::string timeline_page(const RunRecord& record, const TimelinePageText& text);

}  // namespace tessera
