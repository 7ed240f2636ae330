#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

// A span of a rank's work, in seconds from the start of the step. begin_s < 0: the span begins in the previous step.
struct MeasuredInterval {
  enum class Kind : uint8_t { kCompute, kWait, kCollective };
  Kind kind = Kind::kCompute;
  // kCompute: the unit's name under FullyShardedDataParallel, otherwise "forward" or "backward"; "optimizer" for the
  // optimizer's step. Other kinds: the operation, such as "all-gather of unit 'blocks.3'".
  std::string name;
  double begin_s = 0;
  double end_s = 0;
  bool in_backward = false;
};

// The measured training step of median time.
struct MeasuredStep {
  double total_s = 0;  // from the end of the previous optimizer step to the end of this one
  double wait_s = 0;   // time in which the rank was blocked
  int steps = 0;       // number of steps in the trace, except the first
  std::vector<MeasuredInterval> intervals;
};

// Returns `rank`'s step of median time, from the last run in a trace file (TESSERA_TRACE). Ignores the first step,
// which creates the optimizer's state. A step ends with an optimizer's span. Throws std::invalid_argument, naming the
// file, if it is unreadable, not a trace, or has fewer than three steps of the rank, including the first.
MeasuredStep measured_step(const std::filesystem::path& trace, int rank);

}  // namespace tessera
