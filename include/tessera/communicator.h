#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/detail/operation_handle.h>
#include <tessera/errors.h>

namespace tessera {

namespace internal {
struct Collective;
class LiveGroup;
class SingleThreadChecker;
class TrafficCounter;
}  // namespace internal

// How the values of the ranks are combined. The average is the sum divided by the number of ranks.
enum class ReduceOp { kSum, kAverage, kMax, kMin };

// The traffic of one rank since the group was made.
struct Traffic {
  int64_t sent_bytes = 0;   // payload that this rank sent to other ranks
  int64_t collectives = 0;  // operations started
  double wait_s = 0;        // time that this rank spent in Pending::wait()
};

// The handle of a collective in flight. It owns references to all tensors of the operation until the operation
// completes. Move-only. Must be used by the thread that started the operation.
//
// A handle may be destroyed without wait(), for example during unwinding. The tensors then live as long as the
// communicator, and the results are unspecified.
class [[nodiscard]] Pending : public internal::OperationHandle<internal::AsyncOperation> {
 public:
  using OperationHandle::OperationHandle;

  // Blocks until the operation completes, at most for the group's timeout. The results are then in memory (gloo), or
  // ordered into the current stream of the device (NCCL). The caller may then read them, and change the arguments. A
  // second call is a no-op. Throws CommError, which names the operation, the unit and the rank.
  void wait();
};

class Communicator;

namespace internal {

// The part of a Communicator that a backend implements. Communicator checks arguments, traces and counts traffic.
class CommunicatorBackend {
 public:
  virtual ~CommunicatorBackend();
  CommunicatorBackend(const CommunicatorBackend&) = delete;
  CommunicatorBackend& operator=(const CommunicatorBackend&) = delete;

  // Whether an all-gather or reduction of `full_numel` elements moves data only in Pending::wait(). Starting such an
  // operation early hides nothing. True for gloo if all ranks share memory, except for small operations.
  virtual bool is_lazy(int64_t /*full_numel*/) const { return false; }
  // Whether start() accepts Collective::pieces.
  virtual bool takes_pieces() const { return false; }
  // Throws std::invalid_argument, naming `what`, if tensors have no values (CountingCommunicator).
  virtual void require_values(std::string_view /*what*/) const {}

 protected:
  CommunicatorBackend();

  // Starts an operation. The caller has checked the arguments. Not called in a world of one.
  virtual Pending start(Collective collective) = 0;
  // Aborts this group, without the groups split from it. See Communicator::abort().
  virtual void abort_this(const std::string& reason) noexcept = 0;
  // Makes a group of `members`, which are ranks of this group. This rank becomes rank `position`. `name` is unique
  // among the groups split from this one. Collective over this group. A rank that is in no new group passes no members
  // and -1, and gets null.
  virtual std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                                  int position) = 0;
  // Throws CommError if a completed operation was aborted. If `all`, first waits for all operations.
  virtual void require_ended(std::string_view /*what*/, bool /*all*/) {}

  // Detects a second thread in start() or in a blocking call: see refuse_second_thread().
  SingleThreadChecker& single_thread_checker() { return *single_thread_checker_; }

  void count_sent(int64_t bytes) noexcept;
  void count_wait(std::chrono::nanoseconds duration, const std::string& operation);
  // The counters of this group, then of the groups that it was split from.
  std::vector<std::shared_ptr<TrafficCounter>> counters_;

 private:
  const std::unique_ptr<SingleThreadChecker> single_thread_checker_;
  const std::unique_ptr<LiveGroup> live_group_;
};

}  // namespace internal

// One rank's handle of a group of ranks that train together.
//
// Every operation is collective: all ranks must call it in the same order with the same counts. It starts the exchange
// and returns. Pending::wait() completes it, at most timeout() later. Tensors must be contiguous, on device(), and
// without conjugate or negative bits. Before wait(), their contents must not be changed, and results must not be read.
// Operations that only move data take any dtype. Reductions take integers of 8 to 64 bits, Half, BFloat16, Float and
// Double; averages take only the floating types. `what` describes the use of the operation ("unit 'blocks.3'"). It must
// be equal on all ranks, and appears in errors. `counts` are numbers of elements per rank, in rank order; 0 is allowed.
// Empty means equal parts: `full` then has size() times the elements of `shard`.
//
// On gloo, reductions add in rank order, so results are the same on every run and for every operation. 16-bit types are
// added in fp32 and rounded once. An average is the sum divided by size(). On NCCL, the operations are NCCL's,
// unless InitOptions::rank_order_sums is set.
//
// Ranks must wait for operations in one order, in a group and over all of their groups. If one rank waits in a group
// and another one in the parent group, they deadlock. On gloo such waits soon end with an error that names them, unless
// both ranks have started the operation for which the other one waits.
//
// A communicator must be called by one thread at a time; this includes waits. If a second thread is detected, the group
// is aborted. All operations throw std::invalid_argument for invalid arguments, and CommError for a broken group.
class Communicator : public internal::CommunicatorBackend {
 public:
  ~Communicator() override;

  int rank() const noexcept { return rank_; }             // 0 to size() - 1
  int size() const noexcept { return size_; }             // the world size
  at::Device device() const noexcept { return device_; }  // device of all tensors
  // The longest time that an operation waits for the other ranks.
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  // full <- shard of rank 0, shard of rank 1, ... `shard` may be this rank's part of `full`.
  Pending all_gather(at::Tensor full, at::Tensor shard, std::vector<int64_t> counts = {}, std::string_view what = {});

  // shard <- this rank's part of the reduction of all ranks' `full` by `op`. Leaves `full` unspecified.
  Pending reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op = ReduceOp::kSum,
                         std::vector<int64_t> counts = {}, std::string_view what = {});

  // tensor <- reduction of all ranks' `tensor` by `op`, with the same bits on every rank.
  Pending all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum, std::string_view what = {});

  // tensor <- root's tensor.
  Pending broadcast(at::Tensor tensor, int root = 0, std::string_view what = {});

  // On root: tensor <- reduction of all ranks' `tensor` by `op`. On other ranks `tensor` is unchanged.
  Pending reduce(at::Tensor tensor, int root = 0, ReduceOp op = ReduceOp::kSum, std::string_view what = {});

  // shard <- this rank's part of root's `full`. Other ranks pass an undefined `full`.
  Pending scatter(at::Tensor shard, at::Tensor full, int root = 0, std::vector<int64_t> counts = {},
                  std::string_view what = {});

  // receive <- the parts that all ranks send to this one, in rank order. `send` has the part for each rank, in rank
  // order. The count of elements from rank a to rank b must be equal on both ranks. Both tensors must have one dtype.
  Pending all_to_all(at::Tensor receive, at::Tensor send, std::vector<int64_t> receive_counts,
                     std::vector<int64_t> send_counts, std::string_view what = {});

  void barrier(std::string_view what = {});  // returns when all ranks have called it

  // Waits for all operations of this group and of groups split from it. If one was aborted, throws CommError, whose
  // text begins with `what`. Must be called before results are given to the user: on NCCL, wait() does not block the
  // host, and a peer's death leaves results undefined. Not collective.
  void throw_if_aborted(std::string_view what);
  // Copies the result of an awaited operation to host memory. Throws CommError if the operation was aborted.
  at::Tensor to_host(const at::Tensor& result, std::string_view what);

  // Makes a new group of the ranks with the same `color`, numbered by `key`, then by rank (MPI_Comm_split). The new
  // group has this group's backend, device and timeout. It lives as long as this group, so that a failed rank can still
  // publish its reason. Its traffic counts in this group's traffic() as well. Its errors name ranks by their numbers in
  // the new group, and list those in this group. Returns null if color is negative. Collective over this group.
  std::shared_ptr<Communicator> split(int color, int key = 0);

  // Like split(), for colors (0 or more) that every rank can compute. Members keep their order. One small all-reduce
  // checks that all ranks compute equal colors; if not, all throw std::invalid_argument.
  std::shared_ptr<Communicator> split_by(const std::function<int(int rank)>& color_of);

  // "" for the group of all ranks, else its members: "ranks 0, 2 of 4".
  const std::string& label() const noexcept { return label_; }

  // Aborts the group and the groups split from it, because this rank cannot continue. Every operation of every rank
  // then soon throws an error with `reason`. Not collective. Thread-safe. Later calls are no-ops.
  void abort(const std::string& reason) noexcept;
  Traffic traffic() const noexcept;  // thread-safe

  // Returns the seconds that this rank's thread has waited since the last call, by operation, including groups split
  // from this one. The first call starts recording. Thread-safe. Each call resets the times, so only WaitReporter
  // (wait_report.h) may call it.
  std::map<std::string, double> reset_wait_times();

  // Allocates uninitialised memory [numel] on device(), registered with the backend if InitOptions::registered_memory
  // is set.
  virtual at::Tensor buffer(int64_t numel, at::ScalarType dtype);

  // Starts an operation that has no function above. For Tessera's own use.
  Pending begin(internal::Collective collective);

 protected:
  Communicator(int rank, int size, at::Device device, std::chrono::milliseconds timeout);

 private:
  std::shared_ptr<Communicator> group_of(const std::vector<int>& members, int color);

  const int rank_;
  const int size_;
  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  std::string label_;
  std::mutex parts_mutex_;
  std::vector<std::shared_ptr<Communicator>> parts_;  // guarded by parts_mutex_
  int64_t splits_ = 0;                                // guarded by parts_mutex_
};

}  // namespace tessera
