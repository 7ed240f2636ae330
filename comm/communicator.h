#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/errors.h"
#include "tessera/comm/pending.h"

namespace tessera {

enum class ReduceOp { kSum, kAverage, kMax, kMin };

// What one rank has moved since the group was made.
struct Traffic {
  int64_t sent_bytes = 0;   // payload that this rank sent to other ranks
  int64_t collectives = 0;  // operations started
  double wait_s = 0;        // time this rank's thread spent in Pending::wait()
};

// A group of ranks that train together, seen from one of them.
//
// Every operation is collective: all ranks call it in the same order with the same counts. It
// starts the exchange and returns; Pending::wait() ends it, at most timeout() later. Tensors are
// contiguous, on device(); their contents must not change, and results not be read, before wait().
// What only moves data takes any dtype; reductions take integers of 8 to 64 bits, Half, BFloat16, Float
// and Double, averages the floating ones of these. (For a bool, reduce a uint8; for a complex tensor, its
// view_as_real.) `what` says what the operation is for ("unit 'blocks.3'") and appears in errors; it is the
// same on all ranks.
//
// Counts, where taken, are numbers of elements per rank in rank order; empty means even, full =
// size() * shard. Counts of 0 are fine, and so are tensors of 0 elements.
//
// On gloo every operation is a set of direct exchanges between pairs of ranks, and reductions add
// the ranks' contributions in rank order, so that results are the same on every run and in every
// operation (a reduce-scatter and an all-reduce of the same numbers agree bit for bit). 16-bit
// types are added in fp32 and rounded once. An average is the sum divided by size(). On NCCL the
// operations are NCCL's own.
//
// One thread at a time calls a communicator. All operations throw std::invalid_argument for
// arguments that cannot be meant, and CommError for a group that is broken.
class Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }             // the world size
  at::Device device() const noexcept { return device_; }  // where tensors must be
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

  // Returns when all ranks have called it.
  void barrier(std::string_view what = {});

  // A new group of those ranks that give the same `color`, numbered by `key`, then by their rank
  // here (MPI_Comm_split): what hybrid sharding is made of. It has this group's backend, device and
  // timeout, lives as long as this one (so that a rank that fails can still say why to those who
  // wait for it there), and what it moves counts in this group's traffic() too.
  // Its errors number ranks as the new group does, and list who they are here. Null where color
  // is negative. Collective over this group; throws as the operations do.
  std::shared_ptr<Communicator> split(int color, int key = 0);

  // "" for the group of all ranks, else who its members are: "ranks 0, 2 of 4".
  const std::string& label() const noexcept { return label_; }

  // Ends the group because this rank cannot go on: every operation of every rank then fails soon,
  // with `reason` in its error. So do the groups split from it. Not collective; safe from any
  // thread, and more than once.
  void abort(const std::string& reason) noexcept;

  Traffic traffic() const noexcept;

 protected:
  Communicator(int rank, int size, at::Device device, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), device_(device), timeout_(timeout) {}

  // What backends implement: the same operations, checked, with counts always of size() entries
  // and tensors flat. A world of one never gets here.
  using Counts = std::vector<int64_t>;
  virtual Pending start_all_gather(at::Tensor full, at::Tensor shard, Counts counts, std::string what) = 0;
  virtual Pending start_reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op, Counts counts,
                                       std::string what) = 0;
  virtual Pending start_all_reduce(at::Tensor tensor, ReduceOp op, std::string what) = 0;
  virtual Pending start_broadcast(at::Tensor tensor, int root, std::string what) = 0;
  virtual Pending start_reduce(at::Tensor tensor, int root, ReduceOp op, std::string what) = 0;
  virtual Pending start_scatter(at::Tensor shard, at::Tensor full, int root, Counts counts, std::string what) = 0;

  // abort(), and split() once it is known who is in the group: `name` is the same on its ranks and
  // no other group's.
  virtual void abort_this(const std::string& reason) noexcept = 0;
  virtual std::shared_ptr<Communicator> make_part(const std::string& name, int rank, int size) = 0;

  void count_sent(int64_t bytes) noexcept { count(&Counters::sent_bytes, bytes); }
  void count_wait(std::chrono::nanoseconds duration) noexcept { count(&Counters::wait_ns, duration.count()); }

 private:
  at::Tensor checked(const at::Tensor& tensor, const char* operation, const char* argument) const;
  Counts checked(Counts counts, const at::Tensor& full, const at::Tensor& shard, const char* operation) const;
  void check_root(int root, const char* operation) const;
  void check_reducible(const at::Tensor& tensor, ReduceOp op, const char* operation, std::string_view what) const;

  struct Counters {
    std::atomic<int64_t> sent_bytes = 0;
    std::atomic<int64_t> collectives = 0;
    std::atomic<int64_t> wait_ns = 0;
  };
  void count(std::atomic<int64_t> Counters::*what, int64_t amount) noexcept {
    for (const auto& counters : counters_) *counters.*what += amount;
  }

  const int rank_;
  const int size_;
  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  std::string label_;
  // This group's own, then those of the groups that it was split from.
  std::vector<std::shared_ptr<Counters>> counters_{std::make_shared<Counters>()};
  std::mutex parts_mutex_;  // guards the next two
  std::vector<std::shared_ptr<Communicator>> parts_;
  int64_t splits_ = 0;
};

}  // namespace tessera
