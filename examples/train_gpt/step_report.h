#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/wait_report.h>
#include "trainable.h"

namespace train_gpt {

// What is known after an optimizer step.
struct StepReport {
  int64_t step = 0;           // 1 for the first
  double loss = 0.0;          // nats a token, the mean over all ranks
  double tokens_per_s = 0.0;  // of all ranks together, validation not counted
  double lr = 0.0;
  double grad_norm = 0.0;          // before clipping
  std::optional<double> val_loss;  // after this step, where it was time for it
  MemoryUse memory;                // this rank's
  // Since the last ones, where it was time for it.
  std::optional<tessera::WaitReport> waits;
  std::vector<MemoryUse> memory_by_rank;  // with `waits`; else empty
};

}  // namespace train_gpt
