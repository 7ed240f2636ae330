#include "core/comm/gloo/gloo_collectives.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/comm/rank_order_sum.h"

namespace tessera::internal {
namespace {

// Up to this size, an all-reduce or broadcast of more than two ranks sends whole tensors in one step. A larger one has
// two steps, in which the busiest rank sends fewer bytes: a reduce-scatter or a scatter, and then an all-gather.
constexpr int64_t kOneStepBytes = 1 << 16;
// The limit for an all-reduce between two ranks, where both algorithms send equally many bytes. One step needs one wait
// instead of two. Above this size one step is slower, because each rank adds all elements instead of half of them.
constexpr int64_t kOneStepBytesOfTwo = 1 << 19;
// With more ranks than this, a maximum or minimum of few integers uses reduce_by_doubling(), to send fewer messages.
constexpr int kMostDirectRanks = 8;

// Splits the concatenation of `pieces` by rank. Returns views of each rank's part, in order, without empty views.
std::vector<std::vector<at::Tensor>> parts_of(const std::vector<at::Tensor>& pieces,
                                              const std::vector<int64_t>& counts) {
  std::vector<std::vector<at::Tensor>> parts(counts.size());
  size_t piece = 0;
  int64_t begin = 0;  // offset in pieces[piece]
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    for (int64_t missing = counts[rank]; missing > 0;) {
      const int64_t numel = std::min(missing, pieces[piece].numel() - begin);
      if (numel > 0) parts[rank].push_back(pieces[piece].narrow(0, begin, numel));
      missing -= numel;
      begin += numel;
      if (begin == pieces[piece].numel()) ++piece, begin = 0;
    }
  }
  return parts;
}

int64_t numel_of(const std::vector<at::Tensor>& segments) {
  return std::transform_reduce(segments.begin(), segments.end(), int64_t{0}, std::plus<>(),
                               [](const at::Tensor& segment) { return segment.numel(); });
}

void send_segments(GlooOperation& op, const std::vector<at::Tensor>& segments, int to) {
  for (size_t i = 0; i < segments.size(); ++i) op.send(segments[i], to, i);
}

}  // namespace

bool spreads_by_doubling(const at::Tensor& tensor, ReduceOp reduce, int size) {
  const bool is_in_any_order =
      c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) && reduce != ReduceOp::kSum;
  return size > kMostDirectRanks && static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes && is_in_any_order;
}

void GlooCollectives::start(const Collective& collective) const {
  const at::Tensor &full = collective.full, &shard = collective.shard;
  const auto& counts = collective.counts;
  const auto& pieces = collective.pieces;
  const ReduceOp reduce = collective.op;
  const int root = collective.root;
  switch (collective.kind) {
    case Collective::kAllGather:
      return exchange_shards(full, shard, counts);
    case Collective::kReduceScatter:
      return reduce_scatter(pieces.empty() ? std::vector<at::Tensor>{full} : pieces, shard, counts, reduce);
    case Collective::kAllReduce:
    case Collective::kBackendAllReduce:  // only for an empty tensor, or without a TCP transport
      return all_reduce(full, reduce);
    case Collective::kBroadcast:
      return broadcast(full, root);
    case Collective::kReduce:
      return reduce_to_root(full, reduce, root);
    case Collective::kScatter: {
      const auto parts = rank_ == root ? full.split_with_sizes(counts) : std::vector<at::Tensor>();
      send_parts(parts, shard, root);
      if (rank_ == root && parts[root].const_data_ptr() != shard.const_data_ptr()) shard.copy_(parts[root]);
      return;
    }
    case Collective::kAllToAll: {
      const auto to = collective.all_to_all.sent.split_with_sizes(collective.all_to_all.send_counts);
      const auto from = collective.all_to_all.received.split_with_sizes(collective.all_to_all.receive_counts);
      exchange([&](int peer) { op_.send(to[peer], peer); }, [&](int peer) { op_.receive(from[peer], peer); });
      if (from[rank_].numel() > 0) from[rank_].copy_(to[rank_]);
      return;
    }
  }
}

// Starts all sends and receives. If the transports are not eager, starts the sends first: a receive whose send is
// already announced can copy a small message at once. Each rank sends to its next rank first, to spread the load.
template <class Send, class Receive>
void GlooCollectives::exchange(Send send, Receive receive) const {
  const auto receive_all = [&] {
    for (int step = 1; step < size_; ++step) receive((rank_ - step + size_) % size_);
  };
  if (are_eager_) receive_all();
  for (int step = 1; step < size_; ++step) send((rank_ + step) % size_);
  if (!are_eager_) receive_all();
}

// Copies every rank's shard to every rank's full tensor.
void GlooCollectives::exchange_shards(const at::Tensor& full, const at::Tensor& shard,
                                      const std::vector<int64_t>& counts) const {
  const auto parts = full.split_with_sizes(counts);
  exchange([&](int to) { op_.send(shard, to); }, [&](int from) { op_.receive(parts[from], from); });
  const at::Tensor& own = parts[rank_];
  if (own.numel() > 0 && own.const_data_ptr() != shard.const_data_ptr()) own.copy_(shard);
}

// Sends parts[i] to rank i. Returns every rank's values for this rank's part, indexed by segment and rank.
// This rank's own segments are not copied. Received segments share one allocation of at least the full tensor's size:
// the memory cache may hold a block of that size, and a cached block costs less than fresh pages.
GlooCollectives::Segments GlooCollectives::exchange_parts(const Segments& parts) const {
  const auto& own = parts[rank_];
  Segments segments;
  for (const at::Tensor& segment : own) segments.emplace_back(size_, segment);
  at::Tensor room;
  if (!own.empty()) {
    int64_t full_numel = 0;
    for (const auto& part : parts) full_numel += numel_of(part);
    room = op_.make_staging(std::max(full_numel, numel_of(own) * (size_ - 1)), own[0].scalar_type());
  }
  int64_t begin = 0;
  exchange([&](int to) { send_segments(op_, parts[to], to); },
           [&](int from) {
             for (size_t i = 0; i < own.size(); ++i) {
               segments[i][from] = room.narrow(0, begin, own[i].numel());
               begin += own[i].numel();
               op_.receive(segments[i][from], from, i);
             }
           });
  return segments;
}

// The root sends parts[i] to rank i's `own`, but does not copy its own part. Other ranks do not read `parts`.
void GlooCollectives::send_parts(const std::vector<at::Tensor>& parts, const at::Tensor& own, int root) const {
  if (rank_ != root) return op_.receive(own, root);
  exchange([&](int to) { op_.send(parts[to], to); }, [](int) {});
}

// False for shared memory, whose data arrives only in wait(), and for small sums, which cost less than waking a thread.
bool GlooCollectives::reduces_in_background(const at::Tensor& tensor) const {
  return are_eager_ && static_cast<int64_t>(tensor.nbytes()) > kOneStepBytes;
}

void GlooCollectives::reduce_scatter(const std::vector<at::Tensor>& pieces, const at::Tensor& shard,
                                     const std::vector<int64_t>& counts, ReduceOp reduce) const {
  const Segments parts = parts_of(pieces, counts);
  const auto& own = parts[rank_];
  const auto in_background = [&] {
    if (!reduces_in_background(shard)) return false;
    // Sums are written before all data is sent, so they must not overwrite data that is still to be sent.
    const bool is_apart =
        std::ranges::none_of(pieces, [&](const at::Tensor& piece) { return shard.is_alias_of(piece); });
    return is_apart || (own.size() == 1 && shard.const_data_ptr() == own[0].const_data_ptr());
  };
  if (!in_background()) {
    op_.complete = [shard, reduce, segments = exchange_parts(parts), rank = rank_] {
      int64_t begin = 0;
      for (const auto& segment : segments) {
        const int64_t numel = segment[rank].numel();
        reduce_in_rank_order(shard.narrow(0, begin, numel), segment, reduce);
        begin += numel;
      }
    };
    return;
  }
  op_.reduce_in_background(own, shard, reduce, /*publish=*/false);
  exchange([&](int to) { send_segments(op_, parts[to], to); }, [](int) {});
  op_.start_pipeline();
}

void GlooCollectives::all_reduce(const at::Tensor& tensor, ReduceOp reduce) const {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (spreads_by_doubling(tensor, reduce, size_)) return reduce_by_doubling(tensor, reduce);
  if (bytes <= (size_ == 2 ? kOneStepBytesOfTwo : kOneStepBytes)) {
    std::vector<at::Tensor> parts(size_, tensor);
    exchange([&](int to) { op_.send(tensor, to); },
             [&](int from) { parts[from] = op_.receive_new(tensor.numel(), tensor.scalar_type(), from); });
    op_.complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
    return;
  }
  const auto counts = even_counts(tensor.numel(), size_);
  if (reduces_in_background(tensor)) {
    const auto parts = tensor.split_with_sizes(counts);
    op_.reduce_in_background({parts[rank_]}, parts[rank_], reduce, /*publish=*/true);
    exchange([&](int to) { op_.send(parts[to], to); }, [](int) {});
    op_.next_step();
    exchange([](int) {}, [&](int from) { op_.receive(parts[from], from); });
    return op_.start_pipeline();
  }
  const Segments parts = parts_of({tensor}, counts);
  op_.complete = [*this, tensor, own = parts[rank_][0], segments = exchange_parts(parts), reduce, counts] {
    reduce_in_rank_order(own, segments[0], reduce);
    op_.next_step();
    exchange_shards(tensor, own, counts);
    op_.wait_for_messages();
  };
}

// Each step doubles the number of ranks whose values are in a rank's result: the rank itself and ranks before it
// (dissemination; Hensgen, Finkel and Manber, 1988). Some ranks are included twice, which does not change a maximum or
// minimum. Each pair of ranks exchanges at most one message in each direction.
void GlooCollectives::reduce_by_doubling(const at::Tensor& tensor, ReduceOp reduce) const {
  const auto start_step = [*this, tensor](int distance) {
    op_.send(tensor, (rank_ + distance) % size_);
    return op_.receive_new(tensor.numel(), tensor.scalar_type(), (rank_ - distance + size_) % size_);
  };
  op_.complete = [*this, tensor, reduce, start_step, received = start_step(1)]() mutable {
    for (int distance = 2;; distance *= 2) {
      reduce_in_rank_order(tensor, {tensor, received}, reduce);
      if (distance >= size_) return;
      received = start_step(distance);
      op_.wait_for_messages();
    }
  };
}

void GlooCollectives::reduce_to_root(const at::Tensor& tensor, ReduceOp reduce, int root) const {
  if (rank_ != root) return op_.send(tensor, root);
  if (reduces_in_background(tensor)) {
    op_.reduce_in_background({tensor}, tensor, reduce, /*publish=*/false);
    return op_.start_pipeline();
  }
  std::vector<at::Tensor> parts(size_, tensor);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != root) parts[peer] = op_.receive_new(tensor.numel(), tensor.scalar_type(), peer);
  op_.complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
}

void GlooCollectives::broadcast(const at::Tensor& tensor, int root) const {
  if (size_ == 2 || static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes)
    return send_parts(std::vector<at::Tensor>(size_, tensor), tensor, root);
  // A scatter and an all-gather (van de Geijn): the root sends under twice the tensor's bytes, not size() - 1 times.
  const auto counts = even_counts(tensor.numel(), size_);
  const auto parts = tensor.split_with_sizes(counts);
  send_parts(parts, parts[rank_], root);
  op_.complete = [*this, tensor, own = parts[rank_], counts] {
    op_.next_step();
    exchange_shards(tensor, own, counts);
    op_.wait_for_messages();
  };
}

}  // namespace tessera::internal
