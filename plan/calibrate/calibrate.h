#pragma once

#include <functional>
#include <string>

#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

// What calibrate() runs.
struct CalibrationOptions {
  int ranks = 2;       // at once, each with its own threads, as in a training on this machine
  int threads = 1;     // intra-operator threads of each rank
  bool quick = false;  // fewer sizes and repetitions
  // Called by rank 0's thread with what is measured next; may be empty.
  std::function<void(const std::string& what)> progress;
};

// Measures this machine's CPUs with `ranks` ranks that are threads of this process and compute at the same time:
// kernels where they stand in steps of small decoders, and the cost of an operator beside its kernel
// (calibrate_operators.h); for what is not among them matrix products in fp32 and bfloat16, convolutions and attention
// in fp32, additions of tensors (memory); all-gathers, reduce-scatters and all-reduces, and how much slower compute is
// while an all-reduce goes on; what ranks that share no memory can exchange. With one thread a rank, times are those of
// its processor, so that others on the machine, and ranks beyond its cores, do not count, and means of many calls; else
// medians by the clock. Links between hosts are not measured. Takes some 80 s, quick some 5 s. Throws
// std::invalid_argument for fewer than 1 rank or thread, and what run_ranks() throws. Sets the process's number of
// intra-operator threads, and puts the recorder's allocator before libtorch's. Not in a dry run.
MachineSpeed calibrate(const CalibrationOptions& options);

}  // namespace tessera::internal
