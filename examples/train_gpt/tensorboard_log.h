#pragma once

#include <filesystem>

#include "step_report.h"
#include "tessera/memory/peak_memory.h"
#include "tessera/trace/event_writer.h"

namespace train_gpt {

// The curves of a run for TensorBoard: train/..., val/loss, memory/... of this rank, wait/... of all.
class TensorboardLog {
 public:
  // `memory` outlives this. Throws std::runtime_error if there can be no file in the folder.
  TensorboardLog(const std::filesystem::path& folder, const tessera::PeakMemory& memory)
      : events_(folder), memory_(memory) {}

  // Throws nothing because of the disk: the training goes on.
  void write(const StepReport& report);

 private:
  tessera::EventWriter events_;
  const tessera::PeakMemory& memory_;
};

}  // namespace train_gpt
