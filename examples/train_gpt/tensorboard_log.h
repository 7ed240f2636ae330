#pragma once

#include <filesystem>

#include <tessera/event_writer.h>
#include "step_report.h"

namespace train_gpt {

// The curves of a run for TensorBoard: train/..., val/loss, memory/... and wait/... of all ranks.
class TensorboardLog {
 public:
  // Throws std::runtime_error if there can be no file in the folder.
  explicit TensorboardLog(const std::filesystem::path& folder) : events_(folder) {}

  // Throws nothing because of the disk: the training goes on.
  void write(const StepReport& report);

 private:
  tessera::EventWriter events_;
};

}  // namespace train_gpt
