#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera {

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
  // Large CPU tensors of the process are made in the memory of earlier ones: memory_cache.h.
  // TESSERA_MEMORY_CACHE=0 in the environment switches it off.
  bool cache_memory = true;
  // With NCCL: FullyShardedDataParallel gathers into memory that is registered with the group (ncclMemAlloc, by c10d),
  // so that NCCL moves it without copies of its own, by the switch where there is one. Such memory is the group's alone
  // until it ends. std::invalid_argument where driver or NCCL do not have it.
  bool registered_memory = false;
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
