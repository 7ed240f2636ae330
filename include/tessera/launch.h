#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera {

// The changes to the whole process that init() and run_ranks() make, one field each; false leaves the process as it is.
// Each change is undone when the last group that was made with it is destroyed. Loading Tessera, wrapping a module, or
// a group over the program's own store makes none of them. docs/launch.md has the table.
struct ProcessSetup {
  // Replaces libtorch's CPU allocator by a cache, so that large CPU tensors reuse freed memory (memory_cache.h).
  // TESSERA_MEMORY_CACHE=0 in the environment switches it off. Tensors that outlive the cache stay valid.
  bool cache_memory = true;
  // Sets a handler of std::terminate() that first tells the other ranks the text of the uncaught exception, so that
  // their errors name it. init() with several ranks only.
  bool terminate_handler = true;
  // Permits processes that descend from the ranks' launcher to read and write this process's memory under Yama's
  // ptrace_scope 1 (prctl PR_SET_PTRACER), for InitOptions::peer_memory. init() with several gloo ranks on a host only.
  bool permit_tracing = true;
  // Raises the soft limit of open descriptors (RLIMIT_NOFILE) if the group's connections need more.
  bool raise_descriptor_limit = true;
  // Opens /dev/null as stdin, stdout and stderr if they are closed, so that no connection gets their numbers and with
  // them the program's output.
  bool open_standard_descriptors = true;

  // The names of the fields that are on: "cache_memory, permit_tracing"; "nothing" if none is.
  std::string describe() const;
};

// What init() and run_ranks() make a group with. The same on all ranks but the device.
struct InitOptions {
  // "gloo", "nccl", or empty for the device's own: gloo on CPU, NCCL on CUDA.
  std::string backend;
  // Empty: the CPU, or with "nccl" a CUDA device. Without an index: the only one that this process sees, else number
  // LOCAL_RANK of them; run_ranks: number rank.
  std::optional<at::Device> device;
  // The longest that an operation waits for the other ranks, and that ranks wait to find each other.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // With gloo: ranks of one host copy straight between each other's memory where the kernel lets them,
  // instead of through TCP. TESSERA_PEER_MEMORY=0 in the environment of any of them switches it off.
  bool peer_memory = true;
  // With NCCL: FullyShardedDataParallel gathers into memory that is registered with the group (ncclMemAlloc, by c10d),
  // so that NCCL moves it without copies of its own, by the switch where there is one. Such memory is the group's alone
  // until it ends. std::invalid_argument where driver or NCCL do not have it.
  bool registered_memory = false;
  // What the group changes in the process. May differ between ranks.
  ProcessSetup process = {};
};

// Joins the group that the launcher's environment describes: torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
// Open MPI's (OMPI_COMM_WORLD_RANK, ...) or Slurm's (SLURM_PROCID, SLURM_NTASKS, ...), in this order, the innermost
// first; a world of one if there is none. docs/launch.md lists the variables. Collective; once in a process. Throws
// std::invalid_argument that names the variables if they are half set or contradict each other, and CommError, which
// names the ranks that did not come, if the ranks do not meet within the timeout.
std::shared_ptr<Communicator> init(InitOptions options = {});

// Runs `body` once per rank, the ranks being threads of this process, joined by gloo over loopback or, with a CUDA
// device or "nccl", by NCCL, where each thread has a device of its own as its current one. Returns when all have ended.
// When a rank throws, the group is aborted, and the first error to be thrown is thrown again here. Intra-operator
// threads are the process's own setting.
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body);
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body, InitOptions options);

// Starts this program again as `world` processes of this machine, with argv and torchrun's environment, and returns the
// exit code for main(): 0 if all ended well. When a rank fails, its error is shown, the others are ended, and its exit
// code (128 + signal) is returned; SIGINT, SIGTERM and SIGHUP are passed on. No rank outlives this process. Each rank
// gets its part of the cores (OMP_NUM_THREADS) unless that is set. Throws std::invalid_argument for world < 1, and
// std::logic_error in a process that was started this way or by any launcher: see launched().
int spawn_local(int world, int argc, char** argv);

// Whether a launcher's environment is set, that is, whether init() would join a group.
bool launched();

}  // namespace tessera
