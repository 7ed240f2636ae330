#pragma once

#include <functional>
#include <string>

#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

// Options of calibrate().
struct CalibrationOptions {
  int ranks = 2;       // number of concurrent ranks, as in training on this machine; each has its own threads
  int threads = 1;     // intra-operator threads of each rank
  bool quick = false;  // fewer sizes and repetitions
  // Called on rank 0's thread with the name of the next measurement; may be empty.
  std::function<void(const std::string& what)> progress;
};

// Measures the speed of this machine's CPUs. The `ranks` ranks are threads of this process and compute concurrently.
// Takes about 80 s, or about 5 s if `quick`.
//
// Measures the kernels in training steps of small decoders, and the cost of an operator outside its kernel
// (calibrate_operators.h). For other operators, measures matrix products in fp32 and bfloat16, convolutions and
// attention in fp32, and memory bandwidth (additions). Measures collectives, the slowdown of compute during an
// all-reduce, and collectives without shared memory. Does not measure links between hosts. With one thread a rank,
// times of operators and collectives are means of processor time: other programs, and more ranks than cores, do not
// change them. With more threads they are medians of wall-clock time.
//
// Throws std::invalid_argument for fewer than 1 rank or thread, and the errors of run_ranks(). Sets the process's
// number of intra-operator threads, and installs the recorder's allocator. Must not be called in a dry run.
MachineSpeed calibrate(const CalibrationOptions& options);

}  // namespace tessera::internal
