#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

// What a rank did in a span of time, in seconds from the beginning of the step; a negative beginning is in the one
// before.
struct MeasuredInterval {
  enum class Kind : uint8_t { kCompute, kWait, kCollective };
  Kind kind = Kind::kCompute;
  // Compute: the unit's under FullyShardedDataParallel, else "forward" or "backward"; "optimizer". Others:
  // "all-gather of unit 'blocks.3'".
  std::string name;
  double begin_s = 0;
  double end_s = 0;
  bool in_backward = false;
};

// A training step as it was.
struct MeasuredStep {
  double total_s = 0;  // from the end of the optimizer's step before to the end of its own
  double wait_s = 0;   // in which the rank stood and waited
  int steps = 0;       // in the trace, of which this one took the median time
  std::vector<MeasuredInterval> intervals;
};

// Of a rank's steps in a file of TESSERA_TRACE, the last run's in it, that of median time. The first step, which makes
// the optimizer's state, is none of them. Throws std::invalid_argument, naming the file, where it cannot be read, is no
// trace, or has fewer than three steps of the rank, the first one counted; a step ends with an optimizer's span.
MeasuredStep measured_step(const std::filesystem::path& trace, int rank);

}  // namespace tessera
