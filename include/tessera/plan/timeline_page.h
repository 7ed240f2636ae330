#pragma once

#include <cstdint>
#include <string>

#include <tessera/plan/measured_step.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera {

// The content of a page, except the record.
struct TimelinePageText {
  std::string title{};             // title and first line of the page
  std::string options{};           // how it is trained; below the title
  std::string notes{};             // preformatted lines below the picture, such as a table of choices
  int64_t memory_bytes = 0;        // a line in the picture: a rank's memory; 0: none
  const StepTime* time = nullptr;  // time of a step, drawn below in lanes; null: unknown
  // A record_run() of the same constructor and steps, or null. Its bytes are drawn as a line over the record's;
  // differences are marked.
  const RunRecord* measured = nullptr;
  // A step of its trace, or null; drawn in lanes below those of `time`, with the largest differences. Ignored without
  // `time`.
  const MeasuredStep* measured_time = nullptr;
};

// Returns a self-contained HTML page (UTF-8) that draws a run: bytes by kind over all operators, with the peak, its
// content and place; collectives below; name, unit, module and bytes of the operator under the pointer; and, if the
// time is known, a step's compute by unit and its collectives over milliseconds. Keeps at most 2,000 operators: the
// peak, and those with the most bytes. Names may contain any text.
std::string timeline_page(const RunRecord& record, const TimelinePageText& text);

}  // namespace tessera
