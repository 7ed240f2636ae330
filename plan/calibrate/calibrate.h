#pragma once

#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

struct CalibrationOptions {
  int ranks = 2;       // number of concurrent ranks; should equal the ranks per machine of the planned training
  int threads = 1;     // number of intra-operator threads of each rank
  bool quick = false;  // measures fewer sizes, with fewer repetitions
  // Called with the name of each measurement, on rank 0's thread or the thread of calibrate()'s caller. May be null.
  std::function<void(const std::string& what)> progress;
};

// Measures the speed of this machine's CPUs. Ranks are threads of this process, and compute concurrently. Takes about
// 80 s, or about 5 s if `quick`.
//
// Measures kernels in training steps of small decoders, and the cost of an operator outside its kernel
// (calibrate_operators.h). For other operators, measures matrix products in fp32 and bfloat16, convolutions and
// attention in fp32, and memory bandwidth. With 2 ranks or more, also measures collectives with and without shared
// memory, and the slowdown of compute during an all-reduce. Does not measure links between hosts. With one thread per
// rank, measures operators and shared memory in processor time, so that other programs, and ranks that share a core, do
// not change these results. With more threads, measures them in wall-clock time.
//
// Throws std::invalid_argument for fewer than 1 rank or thread, and the errors of run_ranks(). Sets the process's
// number of intra-operator threads, and installs the recorder's allocator. Must not be called in a dry run.
MachineSpeed calibrate(const CalibrationOptions& options);

// Measures MachineSpeed::between_hosts, and the processor time per byte in MachineSpeed::tcp. Each rank of `comm` must
// be alone on its host. Linux charges the work on network packets to no process. So the processor time is the larger of
// the process's own time and the slowdown of concurrent matrix products. `speed` must be a result of calibrate().
// Returns `speed` with the new fields, equal on all ranks. Does not measure tcp.latency_s: all ranks get rank 0's.
//
// Collective. Takes about 10 s. Throws std::invalid_argument for a group of one rank, a speed without `tcp`, or fewer
// than 1 thread. Throws CommError if a collective fails. Sets the process's number of intra-operator threads.
MachineSpeed calibrate_hosts(MachineSpeed speed, const std::shared_ptr<Communicator>& comm,
                             const CalibrationOptions& options);

}  // namespace tessera::internal
