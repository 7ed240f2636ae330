#pragma once

#include <cstdint>
#include <string>

#include <tessera/plan/measured_step.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera {

// What a page says beside the record.
struct TimelinePageText {
  std::string title;               // of the page and its first line
  std::string options;             // how it is trained, beneath
  std::string notes;               // beneath the picture, as it is, line by line: a table of choices, say
  int64_t memory_bytes = 0;        // a line in the picture: what a rank has; 0: none
  const StepTime* time = nullptr;  // of a step, drawn beneath in lanes; null: not known
  // A real run beside the predicted one, where there was one. The same constructor and steps by record_run(): its bytes
  // are a line over those of the record, and where they differ is marked.
  const RunRecord* measured = nullptr;
  // A step of its trace, with lanes beneath those of `time`, and what differs most; nothing without `time`.
  const MeasuredStep* measured_time = nullptr;
};

// A page (HTML, UTF-8, complete, without anything from a network) that draws a run: bytes by kind over the operators,
// from the constructor to the last step, with the peak, what is in it and where it is; the collectives beneath; for the
// operator under the pointer its name, unit, module and bytes; and, where its time is known, a step's compute by unit
// and its collectives over milliseconds. Of many operators those with the most bytes are kept, 2,000 at most, the peak
// among them. Any text may stand in names.
std::string timeline_page(const RunRecord& record, const TimelinePageText& text);

}  // namespace tessera
