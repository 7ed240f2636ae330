#pragma once

#include <functional>
#include <string>

#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

// Options of calibrate().
struct CalibrationOptions {
  int ranks = 2;       // concurrent ranks, each with its own threads, as in training on this machine
  int threads = 1;     // intra-operator threads of each rank
  bool quick = false;  // fewer sizes and repetitions
  // Called on rank 0's thread with the name of the next measurement; may be empty.
  std::function<void(const std::string& what)> progress;
};

// Measures the speed of this machine's CPUs, with `ranks` ranks that are threads of this process and compute
// concurrently. Takes some 80 s; quick some 5 s.
//
// Measures kernels inside training steps of small decoders, and an operator's cost outside its kernel
// (calibrate_operators.h). For other operators: matrix products in fp32 and bfloat16, convolutions and attention in
// fp32, and additions of tensors (memory). For communication: all-gathers, reduce-scatters and all-reduces, the
// slowdown of compute during an all-reduce, and exchanges without shared memory. Does not measure links between hosts.
// With one thread a rank, times are means of processor time, so other programs and ranks beyond the cores do not count;
// otherwise medians of wall-clock time.
//
// Throws std::invalid_argument for fewer than 1 rank or thread, and the errors of run_ranks(). Sets the process's
// number of intra-operator threads, and installs the recorder's allocator. Must not be called in a dry run.
MachineSpeed calibrate(const CalibrationOptions& options);

}  // namespace tessera::internal
