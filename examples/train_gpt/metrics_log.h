#pragma once

#include <filesystem>
#include <fstream>

#include "step_report.h"

namespace train_gpt {

// metrics.jsonl: a JSON object a line, a line a step, written as the steps end:
//   {"step":1,"loss":4.1,"tokens_per_s":9000.0,"lr":1e-4,"grad_norm":2.0,"val_loss":4.0}
// with val_loss where it was measured.
class MetricsLog {
 public:
  // Replaces the file. Throws std::runtime_error if it cannot.
  explicit MetricsLog(const std::filesystem::path& path);

  // Throws std::runtime_error if the line cannot be written (a full disk).
  void write(const StepReport& report);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace train_gpt
