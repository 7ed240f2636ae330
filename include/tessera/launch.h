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

// The process-wide changes that init(), run_ranks() and Elastic may make. Each field permits one change, which is
// undone when the last group whose options permitted it is destroyed. Loading Tessera, wrapping a module, and making a
// group over the program's own store change nothing in the process. docs/launch.md has a table of the changes.
struct ProcessSetup {
  // Replaces libtorch's CPU allocator by a cache, so that large CPU tensors reuse freed memory (memory_cache.h).
  // TESSERA_MEMORY_CACHE=0 in the environment disables the cache. Tensors that outlive the cache stay valid.
  bool cache_memory = true;
  // Sets a handler of std::terminate(). The handler first sends the text of the uncaught exception to the other ranks,
  // so that their errors quote the text. Applies to init() with several ranks, and to Elastic.
  bool terminate_handler = true;
  // Permits descendants of the ranks' launcher to read and write this process's memory under Yama's ptrace_scope 1
  // (prctl PR_SET_PTRACER). InitOptions::peer_memory needs this. Applies to init() with several gloo ranks on a host.
  bool permit_tracing = true;
  // Raises the soft limit of open descriptors (RLIMIT_NOFILE) if the group's connections need more.
  bool raise_descriptor_limit = true;
  // Opens /dev/null as stdin, stdout and stderr, if these are closed. Otherwise a connection could get the descriptor
  // of stdout, and then receive the program's output.
  bool open_standard_descriptors = true;
  // Sets the number of intra-operator threads to the host's cores (or its container's CPU quota) divided by its ranks,
  // at least 1. Never raises the number. A no-op in run_ranks(), and in these cases: OMP_NUM_THREADS or MKL_NUM_THREADS
  // is set; the program has set a number; a launcher has bound the rank to cores; the host's number of ranks is
  // unknown.
  bool share_cores = true;
  // true: init() sets the signal handlers of stop_requested(). false: the first call of stop_requested() sets them.
  bool stop_signals = false;
  // Prints warnings on stderr, unless the program has its own handler. See set_warning_handler() in errors.h.
  bool print_warnings = true;

  // Returns the names of the fields that are true: "cache_memory, permit_tracing"; "nothing" if all are false.
  std::string describe() const;
};

// Options of init() and run_ranks(). Must be equal on all ranks, except for the device and `process`.
struct InitOptions {
  // "gloo", "nccl", or empty for the device's default: gloo on CPU, NCCL on CUDA.
  std::string backend{};
  // Empty: CUDA with "nccl", otherwise the CPU. CUDA without an index means the only visible device, or of several
  // devices the one whose index is LOCAL_RANK. In run_ranks(), rank r uses CUDA device r, and a device with an index
  // throws std::invalid_argument.
  std::optional<at::Device> device{};
  // The maximum wait for other ranks, in operations and the rendezvous. Time while this process is stopped is excluded.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // With gloo: ranks of one host copy directly between their memories instead of through TCP, if the kernel permits
  // this. TESSERA_PEER_MEMORY=0 in the environment of any of these ranks disables these copies.
  bool peer_memory = true;
  // With NCCL: FullyShardedDataParallel gathers into memory that is registered with the group (ncclMemAlloc, by c10d).
  // NCCL then needs no copies of its own, and uses NVSwitch's multicast if present. The memory is freed with the group.
  // Throws std::invalid_argument with gloo, or if the driver or NCCL does not support such memory.
  bool registered_memory = false;
  // With NCCL: sums and averages of floating types add in rank order, and have the same bits as on gloo. 16-bit types
  // are added in fp32 and rounded once. docs/gpu.md has the costs.
  bool rank_order_sums = false;
  // The process-wide changes that are permitted.
  ProcessSetup process = {};
};

// Joins the group that a launcher's environment describes. Launchers in order of precedence: torchrun (RANK,
// WORLD_SIZE, MASTER_ADDR, MASTER_PORT); Open MPI (OMPI_COMM_WORLD_RANK, ...); other launchers of MPI programs (MPICH's
// and Intel MPI's PMI_RANK, MVAPICH2, JSM, Flux, Cray PALS, PMIx); Slurm (SLURM_PROCID, SLURM_NTASKS, ...). Without a
// launcher, makes a group of one rank. docs/launch.md lists the variables. Collective; must be called at most once in a
// process. Throws std::invalid_argument for invalid options. Also throws it, naming the variables, if some are missing
// or contradict each other. Throws CommError, naming the missing ranks, if not all ranks join within the timeout.
std::shared_ptr<Communicator> init(InitOptions options = {});

// Options of communicator_from() and communicator_from_mpi(). Must be equal on all ranks, except for the index of the
// device. If options differ, every rank throws std::invalid_argument.
struct GroupOptions {
  // "gloo", "nccl", or empty for the device's default: gloo on CPU, NCCL on CUDA. "mpi" moves all data by MPI; only for
  // communicator_from_mpi() on CPU. Must be empty for a process group.
  std::string backend{};
  // Empty: CUDA with "nccl", or for a process group that has no backend for CPU tensors; otherwise the CPU. CUDA
  // without an index means the calling thread's current device.
  std::optional<at::Device> device{};
  // The maximum wait for other ranks, in operations and while the group is formed.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // For these two fields, see InitOptions.
  bool peer_memory = true;
  bool registered_memory = false;
  bool rank_order_sums = false;  // see InitOptions; must be false for a CPU process group
};

// Makes a group of the ranks that share a store, which may be any c10d::Store. The rendezvous uses the store. The group
// uses keys that begin with "tessera/" until the group is destroyed, so the store must live as long as the group. Makes
// no process-wide change (ProcessSetup), and does not change the current device. Collective: ranks that make several
// groups from one store must make them in the same order. Under Yama's ptrace_scope 1, ranks in different processes use
// TCP instead of each other's memory, unless the program permits tracing (prctl PR_SET_PTRACER). Throws
// std::invalid_argument for invalid or unequal arguments. Throws CommError, naming the missing ranks, if not all ranks
// join within the timeout.
std::shared_ptr<Communicator> communicator_from(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                GroupOptions options = {});

namespace internal {
std::shared_ptr<Communicator> communicator_from_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      GroupOptions options);
std::shared_ptr<Communicator> communicator_from_backend(c10::intrusive_ptr<c10d::Backend> backend,
                                                        GroupOptions options);
}  // namespace internal

// Makes a group of the ranks of a c10d process group or backend, which transfers all data and defines the rounding of
// reductions. Its class must implement allreduce() and broadcast(). Uses _allgather_base() and _reduce_scatter_base()
// if the class has them. all_to_all() and split() need send() and recv(). Publishes failures in the process group's
// store. Without a store, the ranks of one host use a store in shared memory; on several hosts or without peer_memory,
// rank 0 serves a store on an open port. Collective: ranks must call this function in the same order among their other
// collectives. While the group exists, no other thread may use the process group. A failure aborts an NCCL process
// group. Otherwise like communicator_from() with a store.
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

// The interface to a library that exchanges messages between ranks, such as MPI (mpi.h). Used by one thread at a time.
class MessageLibrary {
 public:
  // A message in flight. Any thread may destroy the object before completion; the message's memory must stay valid
  // until then.
  class Request {
   public:
    virtual ~Request() = default;
    // Lets all messages progress. Returns whether this one is complete. Throws std::runtime_error on failure.
    virtual bool is_complete() = 0;
  };

  virtual ~MessageLibrary() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int most_tag() const = 0;
  // Returns a text that is equal on ranks that share memory, and different on all other ranks.
  virtual std::string host() const = 0;
  // Returns every rank's `own`, in rank order. Collective.
  virtual std::vector<std::string> exchange(const std::string& own) = 0;
  // Starts to send `bytes` bytes to rank `peer`, or to receive them from it. The memory must stay valid until the
  // request is complete.
  virtual std::unique_ptr<Request> start(void* data, int bytes, int peer, int tag, bool is_send) = 0;
};

// Returns the maximum wait for other ranks while a group is formed: `timeout` (GroupOptions::timeout), or 10 s if
// `timeout` is invalid. Ranks meet despite an invalid value, so that all of them throw an error that names the value.
std::chrono::milliseconds time_to_meet(std::chrono::milliseconds timeout);

// Like communicator_from_mpi(), for any message library.
std::shared_ptr<Communicator> communicator_from_library(std::shared_ptr<MessageLibrary> library, GroupOptions options);

}  // namespace internal

// Runs `body` once for each rank. The ranks are threads of this process, connected by gloo over loopback. With a CUDA
// device or "nccl", NCCL connects them, with one device for each thread. Returns when all ranks have ended. If a rank
// throws, aborts the group and rethrows the first error. Does not change the number of intra-operator threads. Throws
// std::invalid_argument for world < 1, an empty body or invalid options.
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body);
void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body, InitOptions options);

// Starts `world` processes of this program on this machine, with argv and torchrun's environment. Returns the exit code
// for main(): 0 if all ranks succeed. If a rank fails, prints its exit status, ends the other ranks, and returns the
// failed rank's exit code, or 128 + signal if a signal killed it. No rank outlives this process. If OMP_NUM_THREADS is
// not set, sets it so that ranks have equal shares of the cores.
//
// Forwards SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the ranks. After one of the first three, kills (SIGKILL) ranks that
// run longer than `grace`, or at once on a second signal, and returns 128 + signal. If ranks call stop_requested(),
// `grace` must suffice for a checkpoint. SIGUSR1, Slurm's warning, has no such limit. If a rank then ends with 128 +
// SIGUSR1, returns that code, and the other ranks continue. After a failure, other ranks have 5 s to end, or a shorter
// `grace`.
//
// Throws std::invalid_argument for world < 1, and for a `grace` below 0 or above a year. Throws std::logic_error in a
// process that a launcher, such as this function, has started: see launched().
int spawn_local(int world, int argc, char** argv, std::chrono::milliseconds grace = std::chrono::seconds(30));

// Returns how many threads can run concurrently: this process's cores, or its CPU quota (rounded up) if that is lower.
int available_cores();

// Returns whether a launcher's environment is set; false if mpirun or srun started only one rank. If true, init() joins
// a group. Also true for an incomplete or invalid environment, for which init() throws with the variable's name.
bool launched();

// Returns the signal that asks this program to stop: SIGINT, SIGTERM, or SIGUSR1 (Slurm's --signal), received by any
// rank. Returns 0 if no rank has received one. The result is equal on all ranks. So all ranks leave the loop in the
// same step, and can save a checkpoint before they end. Must be called once per step:
//
//   if (const int signal = tessera::stop_requested(*comm)) {
//     tessera::save_checkpoint(...);
//     return 128 + signal;  // main()'s exit code: 130, 138 or 143
//   }
//
// Collective: an all-reduce of one number. On a device, waits for the work in the current stream. The first call in the
// process (or ProcessSetup::stop_signals) sets handlers for these signals, except for signals that the program handles
// or ignores. The handlers are removed with the last group. If the same signal arrives twice, the process ends. Source:
// the signal handling of PyTorch Lightning and of Slurm's requeue scripts.
int stop_requested(Communicator& comm);
inline int stop_requested(const std::shared_ptr<Communicator>& comm) { return stop_requested(*comm); }

namespace internal {
int run_body(const std::function<int()>& body);
}  // namespace internal

// Runs the body of main(), and returns its exit code, or 0 if the body returns void. If an exception leaves the body,
// the other ranks' operations fail with the exception's text. The process prints the text on one line with its rank,
// and ends with exit code 1. If several ranks fail, only the first one prints. If the world size is 1, the line names
// no rank. Like std::terminate(), does not unwind the stack: no destructor runs, so none waits for ranks that have
// failed. Must be called in the main thread, by one caller at a time, and outside try blocks, which would catch the
// exception. Source: torch.distributed.elastic's @record.
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
