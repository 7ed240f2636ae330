#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera {

// Options of init() and run_ranks(). Must be equal on all ranks, except for the device.
struct InitOptions {
  // "gloo", "nccl", or empty for the device's default: gloo on CPU, NCCL on CUDA.
  std::string backend;
  // Empty: the CPU, or with "nccl" a CUDA device. A CUDA device without an index means the only one that this process
  // sees, or else device LOCAL_RANK; in run_ranks(), device rank.
  std::optional<at::Device> device;
  // How long an operation waits for the other ranks, and how long ranks wait to find each other.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // With gloo: ranks of one host copy directly between their memories instead of through TCP, if the kernel permits it.
  // TESSERA_PEER_MEMORY=0 in the environment of any of them disables it.
  bool peer_memory = true;
  // Reuses the memory of large CPU tensors of the process: memory_cache.h. TESSERA_MEMORY_CACHE=0 in the environment
  // disables it.
  bool cache_memory = true;
  // With NCCL: FullyShardedDataParallel gathers into memory that is registered with the group (ncclMemAlloc, by c10d).
  // NCCL then needs no copies of its own, and uses the switch if there is one. Such memory belongs to the group until
  // it is destroyed. Throws std::invalid_argument if the driver or NCCL do not support it.
  bool registered_memory = false;
};

// Joins the group that the launcher's environment describes: torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
// Open MPI's (OMPI_COMM_WORLD_RANK, ...) or Slurm's (SLURM_PROCID, SLURM_NTASKS, ...). The first in this order counts.
// Without a launcher it is a world of one. docs/launch.md lists the variables. Collective; once in a process. Throws
// std::invalid_argument with the names of variables that are incomplete or contradict each other. Throws CommError with
// the missing ranks if the ranks do not meet within the timeout.
std::shared_ptr<Communicator> init(InitOptions options = {});

// Runs `body` once for each rank. The ranks are threads of this process, joined by gloo over loopback, or, with a CUDA
// device or "nccl", by NCCL, with one device for each thread. Returns when all have ended. If a rank throws, aborts the
// group and rethrows the first error. Does not change the number of intra-operator threads.
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body);
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body, InitOptions options);

// Starts this program again as `world` processes on this machine, with argv and torchrun's environment. Returns the
// exit code for main(): 0 if no rank failed. If a rank fails, prints its error, ends the others, and returns its exit
// code (128 + signal). Forwards SIGINT, SIGTERM and SIGHUP. No rank outlives this process. Each rank gets an equal part
// of the cores (OMP_NUM_THREADS) unless that is set. Throws std::invalid_argument for world < 1, and std::logic_error
// in a process that a launcher started, including this function: see launched().
int spawn_local(int world, int argc, char** argv);

// Whether a launcher's environment is set, so that init() would join a group.
bool launched();

}  // namespace tessera
