#pragma once

#include <filesystem>
#include <fstream>
#include <vector>

#include "step_report.h"

namespace train_gpt {

// metrics.jsonl: a JSON object a line, a line a step, written as the steps end:
//   {"step":1,"loss":4.1,"tokens_per_s":9000.0,"lr":1e-4,"grad_norm":2.0,"val_loss":4.0}
// with val_loss where it was measured.
class MetricsLog {
 public:
  // Keeps the lines of the first `kept_steps` steps, for a run that goes on, and drops what follows
  // them. Throws std::runtime_error if it cannot.
  explicit MetricsLog(const std::filesystem::path& path, int64_t kept_steps = 0);

  // The steps whose lines were kept.
  const std::vector<StepReport>& kept() const { return kept_; }

  // Throws std::runtime_error if the line cannot be written (a full disk).
  void write(const StepReport& report);

 private:
  std::filesystem::path path_;
  std::vector<StepReport> kept_;
  std::ofstream file_;
};

}  // namespace train_gpt
