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
class OneCaller;
class TrafficCounter;
}  // namespace internal

// What becomes of the ranks' numbers; an average is the sum divided by the number of ranks.
enum class ReduceOp { kSum, kAverage, kMax, kMin };

// What one rank has moved since the group was made.
struct Traffic {
  int64_t sent_bytes = 0;   // payload that this rank sent to other ranks
  int64_t collectives = 0;  // operations started
  double wait_s = 0;        // time this rank's thread spent in Pending::wait()
};

// The handle of a collective that is under way.
//
// It keeps every tensor of the operation alive, those that the caller gave and those in between,
// until the operation is over. Move-only. Use it from the thread that started the operation.
//
// Destroying a handle that was never waited for is allowed (an exception is unwinding, say): the
// tensors then stay alive as long as the communicator, and the results are unspecified.
class [[nodiscard]] Pending : public internal::OperationHandle<internal::AsyncOperation> {
 public:
  using OperationHandle::OperationHandle;

  // Waits for the operation, at most the group's timeout. The results are then there: in memory (gloo), or ordered
  // into the current stream of the device (NCCL). They may be read, and the tensors changed. A second call returns
  // at once. Throws CommError, which names the operation, the unit and the rank.
  void wait();
};

class Communicator;
namespace internal {
Pending backend_all_reduce(Communicator&, at::Tensor, std::string_view);
Pending reduce_scatter_pieces(Communicator&, at::Tensor, std::vector<at::Tensor>, ReduceOp, std::string_view);
bool exchanges_pieces(const Communicator&);
}  // namespace internal

// A group of ranks that train together, seen from one of them.
//
// Every operation is collective: all ranks call it in the same order with the same counts. It starts the exchange and
// returns; Pending::wait() ends it, at most timeout() later. Tensors are contiguous, on device(), without conjugate or
// negative bits; their contents must not change, and results not be read, before wait(). What only moves data takes any
// dtype; reductions take integers of 8 to 64 bits, Half, BFloat16, Float and Double, averages the floating ones of
// these. `what` says what the operation is for ("unit 'blocks.3'"), the same on all ranks, and appears in errors.
// Counts, where taken, are numbers of elements per rank in rank order, 0 too; empty means even, full = size() * shard.
//
// On gloo reductions add the ranks' contributions in rank order, so that results are the same on every run and in every
// operation. 16-bit types are added in fp32 and rounded once. An average is the sum divided by size(). On NCCL the
// operations are NCCL's own.
//
// What ranks have started they wait for in one order, in a group and over all groups that they are in. Where a rank
// waits in a group first, and another one in the group that this was split from, neither goes on; on gloo such waits
// end soon, and by name, unless both have started what the other one waits for.
//
// One thread at a time calls a communicator, waits included; a second one that is seen to come in between ends the
// group. All operations throw std::invalid_argument for arguments that cannot be meant, and CommError for a group that
// is broken.
class Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }             // which of them this is: 0 to size() - 1
  int size() const noexcept { return size_; }             // the world size
  at::Device device() const noexcept { return device_; }  // where tensors must be
  // The longest that an operation waits for the other ranks.
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  // full <- shard of rank 0, shard of rank 1, ... ; `shard` may be this rank's part of `full`.
  Pending all_gather(at::Tensor full, at::Tensor shard, std::vector<int64_t> counts = {}, std::string_view what = {});

  // shard <- this rank's part of op over ranks of full. `full` is left unspecified.
  Pending reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op = ReduceOp::kSum,
                         std::vector<int64_t> counts = {}, std::string_view what = {});

  // tensor <- op over ranks of tensor, the same bits on every rank.
  Pending all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum, std::string_view what = {});

  // tensor <- root's tensor.
  Pending broadcast(at::Tensor tensor, int root = 0, std::string_view what = {});

  // On root: tensor <- op over ranks of tensor. On the others `tensor` is left as it was.
  Pending reduce(at::Tensor tensor, int root = 0, ReduceOp op = ReduceOp::kSum, std::string_view what = {});

  // shard <- this rank's part of root's `full`; the other ranks pass an undefined `full`.
  Pending scatter(at::Tensor shard, at::Tensor full, int root = 0, std::vector<int64_t> counts = {},
                  std::string_view what = {});

  // receive <- from each rank, in rank order, its part for this one; send: this rank's part for each. What rank a sends
  // to b, and b receives from a, are of one number of elements; both tensors of one dtype.
  Pending all_to_all(at::Tensor receive, at::Tensor send, std::vector<int64_t> receive_counts,
                     std::vector<int64_t> send_counts, std::string_view what = {});

  void barrier(std::string_view what = {});  // returns when all ranks have called it

  // On NCCL, where wait() does not stop the host, a peer's death leaves anything in results. Before they are given
  // away: waits for all that this rank has begun, in groups split from this one too, and throws CommError, which begins
  // with `what`, if any of it was aborted. Not collective.
  void settle(std::string_view what);
  // The same of one result that was waited for: in host memory.
  at::Tensor to_host(const at::Tensor& result, std::string_view what);

  // A new group of those ranks that give the same `color`, numbered by `key`, then by their rank here (MPI_Comm_split).
  // It has this group's backend, device and timeout, lives as long as this one (so that a rank that fails can still say
  // why to those who wait for it there), and what it moves counts in this group's traffic() too. Its errors number
  // ranks as the new group does, and list who they are here. Null where color is negative. internal::Collective over
  // this group.
  std::shared_ptr<Communicator> split(int color, int key = 0);

  // The same where every rank knows the color of all (0 or more): members are in rank order. Throws
  // std::invalid_argument on all ranks where they disagree about a color, which one small all-reduce finds out.
  std::shared_ptr<Communicator> split_by(const std::function<int(int rank)>& color_of);

  // "" for the group of all ranks, else who its members are: "ranks 0, 2 of 4".
  const std::string& label() const noexcept { return label_; }

  // Ends the group, and those split from it, since this rank cannot go on: every operation of every rank then fails
  // soon, with `reason` in its error. Not collective; safe from any thread, and more than once.
  void abort(const std::string& reason) noexcept;
  Traffic traffic() const noexcept;  // what this rank has moved so far; any thread

  // For how many seconds this rank's thread has waited since the last call, by operation, also of groups split from
  // this one. The first call begins to keep that. For one caller: WaitReporter (include/tessera/wait_report.h). Any
  // thread.
  std::map<std::string, double> take_waits();

  // Uninitialised memory [numel] on device(), which the backend may know: InitOptions::registered_memory.
  virtual at::Tensor buffer(int64_t numel, at::ScalarType dtype);

  // Whether an all-gather or a reduction of so many elements moves nothing but while a rank waits for it, so that one
  // begun early is there no earlier (gloo, where all ranks read each other's memory, of what is not small).
  virtual bool moves_only_when_awaited(int64_t /*full_numel*/) const { return false; }

  // How many operations of any group this thread has begun.
  static uint64_t begun_by_this_thread();

 protected:
  Communicator(int rank, int size, at::Device device, std::chrono::milliseconds timeout);

  // What backends implement; they get the operation checked. A world of one never gets here.
  virtual Pending start(internal::Collective collective) = 0;

  // abort(), and split() into these ranks of this one, `position` being this rank's among them. `name` is the same on
  // them and no other group's. Called on ranks that are in no group too, with none and -1, which return null.
  virtual void abort_this(const std::string& reason) noexcept = 0;
  virtual std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                                  int position) = 0;

  // For calls that take time, start() above all; of one that is not alone: ends the group and throws CommError.
  internal::OneCaller& one_caller() { return *one_caller_; }
  [[noreturn]] void refuse_second_thread(const std::string& what);

  // Throws CommError if an operation that has ended was aborted. With `all`, waits for those that have begun.
  virtual void require_ended(std::string_view /*what*/, bool /*all*/) {}

  // Whether start() takes Collective::pieces.
  virtual bool takes_pieces() const { return false; }

  // Throws where other ranks' values cannot be known (CountingCommunicator). `what` needs them.
  virtual void require_other_ranks(std::string_view /*what*/) const {}

  void count_sent(int64_t bytes) noexcept;
  void count_wait(std::chrono::nanoseconds duration, const std::string& operation);

 private:
  friend Pending internal::backend_all_reduce(Communicator&, at::Tensor, std::string_view);
  friend Pending internal::reduce_scatter_pieces(Communicator&, at::Tensor, std::vector<at::Tensor>, ReduceOp,
                                                 std::string_view);
  friend bool internal::exchanges_pieces(const Communicator&);
  Pending begin(internal::Collective collective);
  std::shared_ptr<Communicator> group_of(const std::vector<int>& members, int color);
  void check(internal::Collective& collective) const;

  const int rank_;
  const int size_;
  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  std::string label_;
  const std::unique_ptr<internal::OneCaller> one_caller_;
  // This group's own, then those of the groups that it was split from.
  std::vector<std::shared_ptr<internal::TrafficCounter>> counters_;
  std::mutex parts_mutex_;  // guards the next two
  std::vector<std::shared_ptr<Communicator>> parts_;
  int64_t splits_ = 0;
};

}  // namespace tessera
