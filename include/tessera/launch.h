#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/communicator.h>

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tessera {

// The changes to the whole process that init() and run_ranks() make, one field each; false leaves the process as it is.
// Each change is undone when the last group that was made with it is destroyed. Loading Tessera, wrapping a module, and
// groups over the program's own store change nothing. docs/launch.md has the table.
struct ProcessSetup {
  // Replaces libtorch's CPU allocator by a cache, so that large CPU tensors reuse freed memory (memory_cache.h).
  // TESSERA_MEMORY_CACHE=0 in the environment switches it off. Tensors that outlive the cache stay valid.
  bool cache_memory = true;
  // Sets a handler of std::terminate() that first sends the text of the uncaught exception to the other ranks, so that
  // their errors name it. Only in init() with several ranks.
  bool terminate_handler = true;
  // Permits descendants of the ranks' launcher to read and write this process's memory under Yama's ptrace_scope 1
  // (prctl PR_SET_PTRACER), for InitOptions::peer_memory. Only in init() with several gloo ranks on a host.
  bool permit_tracing = true;
  // Raises the soft limit of open descriptors (RLIMIT_NOFILE) if the group's connections need more.
  bool raise_descriptor_limit = true;
  // Opens /dev/null as stdin, stdout and stderr if they are closed. Otherwise a connection could get the descriptor of
  // stdout, and the program would print into it.
  bool open_standard_descriptors = true;
  // Sets the number of intra-operator threads (at::set_num_threads) to this host's cores divided by its ranks, at least
  // 1. Never raises it, and keeps a number from OMP_NUM_THREADS, MKL_NUM_THREADS, or an earlier call of
  // at::set_num_threads() with another number than the default. A no-op if a launcher has bound the rank to cores. Only
  // in init() with several ranks on a host.
  bool share_cores = true;
  // Sets the signal handlers of stop_requested() in init(), not at its first call.
  bool stop_signals = false;
  // Prints warnings on stderr, unless the program handles them: see set_warning_handler() in errors.h.
  bool print_warnings = true;

  // The names of the fields that are on: "cache_memory, permit_tracing"; "nothing" if none is.
  std::string describe() const;
};

// Options of init() and run_ranks(). Must be equal on all ranks, except for the device and `process`.
struct InitOptions {
  // "gloo", "nccl", or empty for the device's default: gloo on CPU, NCCL on CUDA.
  std::string backend{};
  // Empty: the CPU, or with "nccl" a CUDA device. A CUDA device without an index means the only one visible to this
  // process, or else device LOCAL_RANK; in run_ranks(), device rank.
  std::optional<at::Device> device{};
  // How long operations and the rendezvous wait for other ranks, not counting time in which this process is stopped.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // With gloo: ranks of one host copy directly between their memories instead of through TCP, if the kernel permits it.
  // TESSERA_PEER_MEMORY=0 in the environment of any of them disables it.
  bool peer_memory = true;
  // With NCCL: FullyShardedDataParallel gathers into memory that is registered with the group (ncclMemAlloc, by c10d).
  // NCCL then needs no copies of its own, and uses the switch if there is one. Such memory belongs to the group until
  // it is destroyed. Throws std::invalid_argument if the driver or NCCL do not support it.
  bool registered_memory = false;
  // With NCCL: sums and averages of floating types add in rank order, as on gloo, and give the same bits. 16-bit types
  // are added in fp32 and rounded once. docs/gpu.md has the costs.
  bool rank_order_sums = false;
  // The changes to the process.
  ProcessSetup process = {};
};

// Joins the group that the launcher's environment describes: torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
// Open MPI's (OMPI_COMM_WORLD_RANK, ...), those of other launchers of MPI programs (MPICH's and Intel MPI's PMI_RANK,
// MVAPICH2, JSM, Flux, Cray PALS, PMIx), or Slurm's (SLURM_PROCID, SLURM_NTASKS, ...). Uses the first of these that is
// set. Without a launcher it is a world of one. docs/launch.md lists the variables. Collective; once in a process.
// Throws std::invalid_argument with the names of variables that are incomplete or contradict each other. Throws
// CommError with the missing ranks if the ranks do not meet within the timeout.
std::shared_ptr<Communicator> init(InitOptions options = {});

// Options of communicator_from() and communicator_from_mpi(). Must be equal on all ranks, except for the index of the
// device. Differences throw std::invalid_argument on every rank.
struct GroupOptions {
  // "gloo", "nccl", or empty for the device's default: gloo on CPU, NCCL on CUDA. "mpi", for communicator_from_mpi() on
  // CPU: MPI carries all bytes. Must be "" for a process group.
  std::string backend{};
  // Empty: the CPU; with "nccl", or a process group that has no backend for CPU tensors, CUDA. CUDA without an index
  // means the calling thread's current device.
  std::optional<at::Device> device{};
  // How long an operation waits for the other ranks, and how long ranks wait to find each other.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // See InitOptions.
  bool peer_memory = true;
  bool registered_memory = false;
  bool rank_order_sums = false;  // must be off for a process group of CPUs, which adds in its own order
};

// Makes a group of the ranks that pass the same store: any c10d::Store that they share. The ranks meet in the store,
// and the group uses it until it is destroyed, under keys that begin with "tessera/". The store must live as long as
// the group. Changes nothing in the process (ProcessSetup), and leaves the current device as it is. Collective: ranks
// that make several groups from one store must do so in one order. Under Yama's ptrace_scope 1, ranks that are
// processes use TCP instead of each other's memory, unless the program permits it (prctl PR_SET_PTRACER).
// Throws std::invalid_argument for wrong or unequal arguments, and CommError with the missing ranks if the ranks do not
// meet within the timeout.
std::shared_ptr<Communicator> communicator_from(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                GroupOptions options = {});

namespace internal {
std::shared_ptr<Communicator> communicator_from_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      GroupOptions options);
std::shared_ptr<Communicator> communicator_from_backend(c10::intrusive_ptr<c10d::Backend> backend,
                                                        GroupOptions options);
}  // namespace internal

// Makes a group of the ranks of a c10d process group, or of one backend of c10d, and uses it for all traffic: its
// reductions decide the rounding. The class needs allreduce() and broadcast(); _allgather_base(),
// _reduce_scatter_base() are used if it has them; all_to_all() and split() need send() and recv(). Failures are
// published in the process group's store. Without one, ranks of a host share a store in memory, and otherwise rank 0
// serves one at a port. Ranks must call it in one order with other collectives. No other thread may use the process
// group while this group is in use. A failure aborts a NCCL process group. Otherwise as above.
template <class Group>
  requires std::is_base_of_v<c10d::ProcessGroup, Group>
std::shared_ptr<Communicator> communicator_from(const c10::intrusive_ptr<Group>& group, GroupOptions options = {}) {
  return internal::communicator_from_group(group, std::move(options));
}
template <class Group>
  requires std::is_base_of_v<c10d::Backend, Group>
std::shared_ptr<Communicator> communicator_from(const c10::intrusive_ptr<Group>& backend, GroupOptions options = {}) {
  return internal::communicator_from_backend(backend, std::move(options));
}

namespace internal {

// A library by which the program's ranks exchange messages: MPI (mpi.h). Called by one thread at a time.
class MessageLibrary {
 public:
  // A message in flight. May be destroyed before it is complete, by any thread; its memory must then stay valid.
  class Request {
   public:
    virtual ~Request() = default;
    // Whether the message is complete; lets messages progress. Throws std::runtime_error if it has failed.
    virtual bool is_complete() = 0;
  };

  virtual ~MessageLibrary() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int most_tag() const = 0;
  // Equal on ranks that share memory, and on no others.
  virtual std::string host() const = 0;
  // Gives every rank the texts of all ranks. Collective.
  virtual std::vector<std::string> exchange(const std::string& own) = 0;
  // Starts to send or receive `bytes` bytes. The memory must stay valid until the request is complete.
  virtual std::unique_ptr<Request> start(void* data, int bytes, int peer, int tag, bool is_send) = 0;
};

// communicator_from_mpi(), for any library.
std::shared_ptr<Communicator> communicator_from_library(std::shared_ptr<MessageLibrary> library, GroupOptions options);

}  // namespace internal

// Runs `body` once for each rank. The ranks are threads of this process, joined by gloo over loopback. With a CUDA
// device or "nccl", NCCL joins them, with one device for each thread. Returns when all have ended. If a rank throws,
// aborts the group and rethrows the first error. Does not change the number of intra-operator threads.
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body);
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body, InitOptions options);

// Starts this program again as `world` processes on this machine, with argv and torchrun's environment. Returns the
// exit code for main(): 0 if no rank failed. If a rank fails, prints its error, ends the others, and returns its exit
// code (128 + signal). No rank outlives this process. Each rank gets an equal part of the cores (OMP_NUM_THREADS)
// unless that is set.
//
// Forwards SIGINT, SIGTERM, SIGHUP and SIGUSR1. Kills ranks (SIGKILL) that have not ended `grace` after the first
// signal. SIGUSR1, Slurm's warning, starts no such period. `grace` must suffice to save a checkpoint, if the ranks call
// stop_requested(). A second signal kills at once, unless the first was SIGUSR1. After a rank's failure the others have
// 5 s, and at most `grace`.
//
// Throws std::invalid_argument for world < 1 or a negative `grace`, and std::logic_error in a process that a launcher
// started, including this function: see launched().
int spawn_local(int world, int argc, char** argv, std::chrono::milliseconds grace = std::chrono::seconds(30));

// Whether a launcher's environment is set, so that init() would join a group. Also true if it is set in part or wrong:
// init() then throws, with the variable's name.
bool launched();

// Returns the signal that asks this program to stop, 0 if there is none: SIGINT, SIGTERM, or SIGUSR1 (Slurm's --signal)
// that any rank has received. All ranks get the same answer, so they leave the loop in the same step, and can save a
// checkpoint before they end. Call it once a step:
//
//   if (const int signal = tessera::stop_requested(*comm)) {
//     tessera::save_checkpoint(...);
//     return 128 + signal;  // main()'s exit code: 130 or 143
//   }
//
// Collective: an all-reduce of one number, which on a device waits for the work in its current stream. The first call
// of the process (or ProcessSetup::stop_signals) sets handlers of these signals, except of those that the program
// handles or ignores. They are removed with the last group. A second signal of the same number ends the process.
// Source: the signal handling of PyTorch Lightning and of Slurm's requeue scripts.
int stop_requested(Communicator& comm);
inline int stop_requested(const std::shared_ptr<Communicator>& comm) { return stop_requested(*comm); }

namespace internal {
int run_body(const std::function<int()>& body);
}  // namespace internal

// Runs the body of main(), and returns the exit code: the body's, or 0 if it returns void. If an exception leaves the
// body, the other ranks' operations fail with its text. The process prints it on one line with its rank, and ends with
// exit code 1. If several ranks fail, only the first one prints. Does not unwind: as after std::terminate(), no
// destructor runs, so no destructor waits for ranks that have failed. A world of one prints without a rank. Must be
// called in the main thread, once at a time, and not within a try block, whose handler would get the exception. Source:
// torch.distributed.elastic's @record.
template <class Body>
int run_main(Body&& body) {
  if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
    return internal::run_body([&] {
      body();
      return 0;
    });
  } else {
    return internal::run_body([&] { return static_cast<int>(body()); });
  }
}

}  // namespace tessera
