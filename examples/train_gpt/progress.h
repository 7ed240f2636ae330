#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>

#include "step_report.h"

namespace train_gpt {

// Shows how far the training is.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void show(const StepReport& report) = 0;
  virtual void finish() = 0;  // after the last step, or before an error is shown
};

// On a terminal two lines that are drawn again in place; elsewhere a line every few per cent of
// the steps.
std::unique_ptr<Progress> make_progress(std::ostream& out, bool terminal, int64_t steps);

// Whether standard output is a terminal.
bool standard_output_is_terminal();

}  // namespace train_gpt
