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

// The operation that combines the values of all ranks. kAverage divides the sum by the number of ranks.
enum class ReduceOp { kSum, kAverage, kMax, kMin };

// The traffic of one rank since the group was made.
struct Traffic {
  int64_t sent_bytes = 0;   // payload that this rank sent to other ranks
  int64_t collectives = 0;  // operations started
  double wait_s = 0;        // time that this rank waited for operations
};

// The handle of a collective in flight. The handle owns references to all tensors of the operation until the operation
// completes. Move-only. Must be used by the thread that started the operation.
//
// A handle may be destroyed without wait(), for example during stack unwinding. Its tensors then may live as long as
// the communicator, and the results are unspecified.
class [[nodiscard]] Pending : public internal::OperationHandle<internal::AsyncOperation> {
 public:
  using OperationHandle::OperationHandle;

  // On gloo, blocks until the operation completes, at most for the group's timeout. On NCCL, only makes the device's
  // current stream wait. The caller may then read the results and change the arguments, on that stream. A second call
  // is a no-op. If the operation fails, throws CommError, which names the operation, the unit and the rank.
  void wait();
};

class Communicator;

namespace internal {

// The functions that a backend implements. Communicator checks arguments, traces operations and counts traffic.
class CommunicatorBackend {
 public:
  virtual ~CommunicatorBackend();
  CommunicatorBackend(const CommunicatorBackend&) = delete;
  CommunicatorBackend& operator=(const CommunicatorBackend&) = delete;

  // Returns whether an all-gather or reduction of `full_numel` elements moves data only in Pending::wait(), so that an
  // early start overlaps nothing. True for gloo if all ranks share memory, except for small operations.
  virtual bool is_lazy(int64_t /*full_numel*/) const { return false; }
  // Returns whether start() accepts a full tensor as pieces that are not concatenated (Collective::pieces).
  virtual bool takes_pieces() const { return false; }
  // Throws std::invalid_argument, naming `what`, if tensors have no values, as in a dry run (CountingCommunicator).
  virtual void require_values(std::string_view /*what*/) const {}

 protected:
  CommunicatorBackend();

  // Starts an operation whose arguments the caller has checked. Not called if the world size is 1.
  virtual Pending start(Collective collective) = 0;
  // Aborts this group, but not the groups split from it. See Communicator::abort().
  virtual void abort_this(const std::string& reason) noexcept = 0;
  // Makes a group of `members`, which are ranks of this group. This rank becomes rank `position` of the new group.
  // `name` is unique among the groups split from this group. Collective over this group. A rank outside all new groups
  // passes no members and position -1, and receives null.
  virtual std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                                  int position) = 0;
  // If an operation was aborted, even after its wait(), throws CommError, whose text begins with `what`. If `all`,
  // first waits for all operations.
  virtual void require_ended(std::string_view /*what*/, bool /*all*/) {}

  // Detects a second thread in start() or in a blocking call. See refuse_second_thread().
  SingleThreadChecker& single_thread_checker() { return *single_thread_checker_; }

  void count_sent(int64_t bytes) noexcept;
  void count_wait(std::chrono::nanoseconds duration, const std::string& operation);
  // The traffic counters of this group and of the groups from which it was split, in this order.
  std::vector<std::shared_ptr<TrafficCounter>> counters_;

 private:
  const std::unique_ptr<SingleThreadChecker> single_thread_checker_;
  const std::unique_ptr<LiveGroup> live_group_;
};

}  // namespace internal

// One rank's membership in a group of ranks that train together.
//
// Every operation is collective: all ranks must call the operations in the same order with equal counts. A call starts
// the operation, and Pending::wait() waits for it, at most for timeout(). Tensors must be contiguous, on device(), and
// without conjugate or negative bits. Before wait(), tensors must not be changed, and results must not be read.
// Operations that only move data accept any dtype. Reductions accept integers of 8 to 64 bits (NCCL: not 16), Half,
// BFloat16, Float and Double; averages accept the floating types. `what` names the purpose of the operation ("unit
// 'blocks.3'"). It must be equal on all ranks, and appears in errors. `counts` are the numbers of elements in the
// ranks' parts, in rank order; 0 is allowed. If `counts` is empty, parts are equal, and `full` has size() times the
// elements of `shard`.
//
// On gloo, reductions add in rank order. So a sum has the same bits in every run and from every kind of reduction.
// 16-bit types are added in fp32 and rounded once. An average is the sum divided by size(). On NCCL, the order of
// additions is unspecified unless InitOptions::rank_order_sums is set.
//
// All ranks must wait for operations in the same order, within a group and across groups. If one rank waits in a group
// and another rank in its parent group, both deadlock. On gloo, an error that names both waits soon ends the deadlock.
// Exception: if each rank has started the operation for which the other rank waits, only the timeout ends the deadlock.
//
// A communicator must be called by one thread at a time; this includes waits. If Tessera detects a second thread, it
// aborts the group. All operations throw std::invalid_argument for invalid arguments, and CommError for a broken group.
class Communicator : public internal::CommunicatorBackend {
 public:
  ~Communicator() override;

  int rank() const noexcept { return rank_; }             // 0 to size() - 1
  int size() const noexcept { return size_; }             // the world size
  at::Device device() const noexcept { return device_; }  // device of all tensors
  // Returns the maximum time that an operation waits for the other ranks.
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  // full <- shard of rank 0, shard of rank 1, ... `shard` may be this rank's part of `full`.
  Pending all_gather(at::Tensor full, at::Tensor shard, std::vector<int64_t> counts = {}, std::string_view what = {});

  // shard <- this rank's part of the reduction of all ranks' `full` by `op`. May overwrite `full`.
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

  // receive <- the parts from all ranks, in rank order. `send` has a part for each rank, in rank order. The count of
  // elements from rank a to rank b must be equal on both ranks. Both tensors must have the same dtype.
  Pending all_to_all(at::Tensor receive, at::Tensor send, std::vector<int64_t> receive_counts,
                     std::vector<int64_t> send_counts, std::string_view what = {});

  void barrier(std::string_view what = {});  // returns when all ranks have called it

  // On NCCL, blocks until all operations of this group and of groups split from it complete. If one was aborted, throws
  // CommError, whose text begins with `what`. Must be called before results are returned to the user: NCCL's wait()
  // does not block the host, so results may be undefined after a peer's death. On gloo, a no-op. Not collective.
  void throw_if_aborted(std::string_view what);
  // Copies the result of an operation to host memory. Must be called after its wait(). If the operation was aborted,
  // throws CommError, whose text begins with `what`.
  at::Tensor to_host(const at::Tensor& result, std::string_view what);

  // Makes a new group of the ranks with the same `color`, numbered by `key`, then by rank (MPI_Comm_split). The new
  // group has this group's backend, device and timeout. It lives at least as long as this group, so that a failed rank
  // can still publish its reason. This group's traffic() includes that of the new group. Errors use the new group's
  // rank numbers, and list its members' ranks in this group. Returns null if color is negative. Collective over this
  // group.
  std::shared_ptr<Communicator> split(int color, int key = 0);

  // Like split(), with the color color_of(rank) for each rank of this group; colors must be 0 or more. Members keep
  // their order. One small all-reduce checks that all ranks compute equal colors. If they do not, all ranks throw
  // std::invalid_argument.
  std::shared_ptr<Communicator> split_by(const std::function<int(int rank)>& color_of);

  // Returns the members as text: "ranks 0, 2 of 4"; "" for the group of all ranks.
  const std::string& label() const noexcept { return label_; }

  // Aborts the group and the groups split from it, because this rank cannot continue. All operations of all ranks then
  // soon throw an error with `reason`. Not collective. Thread-safe. Later calls are no-ops.
  void abort(const std::string& reason) noexcept;
  Traffic traffic() const noexcept;  // thread-safe

  // Returns the seconds that this rank's thread has waited since the last call, keyed by operation. Includes groups
  // split from this group. The first call starts the recording. Each call resets the times, so only WaitReporter
  // (wait_report.h) may call this function. Thread-safe.
  std::map<std::string, double> reset_wait_times();

  // Allocates an uninitialised tensor [numel] on device(). Its memory is registered with the backend if
  // InitOptions::registered_memory is set.
  virtual at::Tensor buffer(int64_t numel, at::ScalarType dtype);

  // Starts any operation, also those for which this class has no other function. For Tessera only.
  Pending begin(internal::Collective collective);

 protected:
  Communicator(int rank, int size, at::Device device, std::chrono::milliseconds timeout);

  std::vector<std::shared_ptr<Communicator>> parts();  // the groups split from this group; thread-safe

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
