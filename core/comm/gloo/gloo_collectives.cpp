// The collectives of the gloo backend, as messages of an operation or as one round in shared memory.
#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/gloo/gloo_communicator.h"
#include "core/comm/rank_order_sum.h"
#include "core/comm/shared_memory/shared_rounds.h"

namespace tessera::internal {
namespace {

// Up to here an all-reduce sends whole tensors in one step; above, it is a reduce-scatter and an all-gather, which send
// less where there are more than two ranks. The same for a broadcast, which above this shares the root's work out.
constexpr int64_t kOneStepBytes = 1 << 16;
// Between two ranks both ways send the same, and one step waits once: until adding up twice as much takes longer.
constexpr int64_t kOneStepBytesOfTwo = 1 << 19;
// Above so many ranks the largest or smallest of small integers spread by doubling: steps are waited for one by one,
// but there are few.
constexpr int kMostDirectRanks = 8;

std::vector<int64_t> even_counts(int64_t numel, int size) {
  std::vector<int64_t> counts(size, numel / size);
  for (int rank = 0; rank < numel % size; ++rank) ++counts[rank];
  return counts;
}

// What of a full tensor, which lies in `pieces` one after the other, belongs to each rank: by rank its segments, in
// order, none of them empty.
std::vector<std::vector<at::Tensor>> parts_of(const std::vector<at::Tensor>& pieces,
                                              const std::vector<int64_t>& counts) {
  std::vector<std::vector<at::Tensor>> parts(counts.size());
  size_t piece = 0;
  int64_t begin = 0;  // in the piece
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

Pending GlooCommunicator::start(Collective collective) {
  const auto& [kind, full, shard, what, counts, reduce, root, send_counts, numel, pieces] = collective;
  std::string description = collective.description();
  if (kind == Collective::kReduce) description += " to rank " + std::to_string(root);
  description += " (" + std::to_string(numel) + " elements)";
  if (!label().empty()) description += " in the group of " + label();
  const InCall call(*this, description);
  auto op = std::make_unique<GlooOperation>(shared_from_this(), std::move(description));
  if (fits_in_a_round(collective)) {
    kind == Collective::kAllGather ? gather_in_a_round(*op, collective) : reduce_in_a_round(*op, collective);
    return Pending(std::move(op));
  }
  switch (kind) {
    case Collective::kAllGather:
      exchange_shards(*op, full, shard, counts);
      break;
    case Collective::kReduceScatter:
      reduce_scatter(*op, pieces.empty() ? std::vector<at::Tensor>{full} : pieces, shard, counts, reduce);
      break;
    case Collective::kAllReduce:
      all_reduce(*op, full, reduce);
      break;
    case Collective::kBroadcast:
      broadcast(*op, full, root);
      break;
    case Collective::kReduce:
      reduce_to_root(*op, full, reduce, root);
      break;
    case Collective::kScatter: {
      const auto parts = rank() == root ? full.split_with_sizes(counts) : std::vector<at::Tensor>();
      send_parts(*op, parts, shard, root);
      if (rank() == root && parts[root].const_data_ptr() != shard.const_data_ptr()) shard.copy_(parts[root]);
      break;
    }
    case Collective::kBackendAllReduce:
      op->all_reduce_by_gloo(full);
      break;
    case Collective::kAllToAll: {
      const auto to = shard.split_with_sizes(send_counts), from = full.split_with_sizes(counts);
      exchange([&](int peer) { op->send(to[peer], peer); }, [&](int peer) { op->receive(from[peer], peer); });
      if (from[rank()].numel() > 0) from[rank()].copy_(to[rank()]);
      break;
    }
  }
  return Pending(std::move(op));
}

bool GlooCommunicator::fits_in_a_round(const Collective& collective) const {
  if (!rounds_ || collective.numel == 0 || !collective.pieces.empty()) return false;
  switch (collective.kind) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
      return collective.numel <= rounds_->plan().most_numel();
    case Collective::kAllReduce:
    case Collective::kReduce:
      return collective.numel <= rounds_->plan().most_reduced_numel();
    default:
      return false;
  }
}

void GlooCommunicator::gather_in_a_round(GlooOperation& op, const Collective& collective) {
  const auto& [kind, full, shard, what, counts, reduce, root, send_counts, numel, pieces] = collective;
  const auto element_bytes = static_cast<uint64_t>(full.element_size());
  std::vector<uint64_t> bytes;
  for (const int64_t count : counts) bytes.push_back(static_cast<uint64_t>(count) * element_bytes);
  auto* const all = static_cast<std::byte*>(full.mutable_data_ptr());
  const uint64_t own_begin = std::accumulate(bytes.begin(), bytes.begin() + rank(), uint64_t{0});
  if (shard.nbytes() > 0 && all + own_begin != shard.const_data_ptr())
    std::memcpy(all + own_begin, shard.const_data_ptr(), shard.nbytes());
  count_sent(static_cast<int64_t>(shard.nbytes()) * (size() - 1));
  op.begin_round({shard.const_data_ptr(), shard.nbytes()}, bytes,
                 [full, all, bytes](const SharedRounds::Contributions& shards) {
                   std::byte* place = all;
                   for (size_t peer = 0; peer < shards.size(); place += bytes[peer++])
                     if (shards[peer] != nullptr && bytes[peer] > 0) std::memcpy(place, shards[peer], bytes[peer]);
                 });
}

// Of all that a rank has each other rank reads its part, or all of it.
void GlooCommunicator::reduce_in_a_round(GlooOperation& op, const Collective& collective) {
  const auto& [kind, full, shard, what, counts, reduce, root, send_counts, numel, pieces] = collective;
  const bool has_parts = kind == Collective::kReduceScatter;
  const at::Tensor& out = has_parts ? shard : full;
  const auto element_bytes = static_cast<uint64_t>(full.element_size());
  const uint64_t begin =
      has_parts
          ? element_bytes * static_cast<uint64_t>(std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0}))
          : 0;
  const bool gives = kind != Collective::kReduce || rank() != root;
  const bool gets = (kind != Collective::kReduce || rank() == root) && out.numel() > 0;
  SharedRounds::Contribution own{full.const_data_ptr(), gives ? full.nbytes() : 0};
  if (has_parts) own.unread_begin = begin, own.unread_bytes = out.nbytes();
  count_sent(bytes_sent_to_reduce(collective));
  std::function<void(const SharedRounds::Contributions&)> read;
  if (gets)
    read = [full, out, begin, reduce](const SharedRounds::Contributions& contributions) {
      const auto* const mine = static_cast<const std::byte*>(full.const_data_ptr());
      std::vector<const void*> parts;
      for (const std::byte* contribution : contributions)
        parts.push_back((contribution == nullptr ? mine : contribution) + begin);
      reduce_in_rank_order(out.mutable_data_ptr(), parts, out.numel(), out.scalar_type(), reduce);
    };
  op.begin_round(own, std::vector<uint64_t>(static_cast<size_t>(size()), full.nbytes()), std::move(read));
}

// Who gives in a reduction sends it to all others, or to those who get a part of it or, where the largest or smallest
// of integers are looked for among many, to as many as their number has bits.
int64_t GlooCommunicator::bytes_sent_to_reduce(const Collective& collective) const {
  const auto bytes = static_cast<int64_t>(collective.full.nbytes());
  if (collective.kind == Collective::kReduceScatter) return bytes - static_cast<int64_t>(collective.shard.nbytes());
  if (collective.kind == Collective::kReduce) return rank() == collective.root ? 0 : bytes;
  return bytes * (spreads_by_doubling(collective.full, collective.op)
                      ? std::bit_width(static_cast<unsigned>(size() - 1))
                      : size() - 1);
}

// In memory each rank announces its sends first, so that what is small is read by whoever comes second.
//
// Peers in turn from the next rank on, so that not everybody sends to rank 0 first.
template <class Send, class Receive>
void GlooCommunicator::exchange(Send send, Receive receive) {
  const auto receive_all = [&] {
    for (int step = 1; step < size(); ++step) receive((rank() - step + size()) % size());
  };
  if (!memory_) receive_all();
  for (int step = 1; step < size(); ++step) send((rank() + step) % size());
  if (memory_) receive_all();
}

// Every rank's shard into every rank's full tensor.
void GlooCommunicator::exchange_shards(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                                       const std::vector<int64_t>& counts) {
  const auto parts = full.split_with_sizes(counts);
  exchange([&](int to) { op.send(shard, to); }, [&](int from) { op.receive(parts[from], from); });
  const at::Tensor& own = parts[rank()];
  if (own.numel() > 0 && own.const_data_ptr() != shard.const_data_ptr()) own.copy_(shard);
}

// Each rank's part of what everybody has, this rank's `parts` by rank: its segments one after the other, of each every
// rank's in rank order. This rank's own are where they were. What comes has one memory, of at least as many elements as
// all parts have: what the caller has just freed, maybe, of the same tensor in another stage; no page is touched
// besides.
GlooCommunicator::Segments GlooCommunicator::exchange_parts(GlooOperation& op, const Segments& parts) {
  const auto& own = parts[rank()];
  Segments segments;
  for (const at::Tensor& segment : own) segments.emplace_back(size(), segment);
  at::Tensor room;
  if (!own.empty()) {
    int64_t full_numel = 0;
    for (const auto& part : parts) full_numel += numel_of(part);
    room = op.make_staging(std::max(full_numel, numel_of(own) * (size() - 1)), own[0].scalar_type());
  }
  int64_t begin = 0;
  exchange([&](int to) { send_segments(op, parts[to], to); },
           [&](int from) {
             for (size_t i = 0; i < own.size(); ++i) {
               segments[i][from] = room.narrow(0, begin, own[i].numel());
               begin += own[i].numel();
               op.receive(segments[i][from], from, i);
             }
           });
  return segments;
}

// Root's parts[i] into rank i's `own`, for the others; these need no parts.
void GlooCommunicator::send_parts(GlooOperation& op, const std::vector<at::Tensor>& parts, const at::Tensor& own,
                                  int root) {
  if (rank() != root) return op.receive(own, root);
  exchange([&](int to) { op.send(parts[to], to); }, [](int) {});
}

// What comes from memory is there when it is waited for, and small sums are done sooner than a thread wakes up.
bool GlooCommunicator::reduces_in_background(const at::Tensor& tensor) const {
  return memory_ == nullptr && static_cast<int64_t>(tensor.nbytes()) > kOneStepBytes;
}

void GlooCommunicator::reduce_scatter(GlooOperation& op, const std::vector<at::Tensor>& pieces, const at::Tensor& shard,
                                      const std::vector<int64_t>& counts, ReduceOp reduce) {
  const Segments parts = parts_of(pieces, counts);
  const auto& own = parts[rank()];
  const auto in_background = [&] {
    if (!reduces_in_background(shard)) return false;
    // A sum that comes before all is sent must not come where something is sent from.
    const bool is_apart =
        std::ranges::none_of(pieces, [&](const at::Tensor& piece) { return shard.is_alias_of(piece); });
    return is_apart || (own.size() == 1 && shard.const_data_ptr() == own[0].const_data_ptr());
  };
  if (!in_background()) {
    op.complete = [shard, reduce, segments = exchange_parts(op, parts), rank = rank()] {
      int64_t begin = 0;
      for (const auto& segment : segments) {
        const int64_t numel = segment[rank].numel();
        reduce_in_rank_order(shard.narrow(0, begin, numel), segment, reduce);
        begin += numel;
      }
    };
    return;
  }
  op.reduce_in_background(own, shard, reduce, /*publish=*/false);
  exchange([&](int to) { send_segments(op, parts[to], to); }, [](int) {});
  op.start_pipeline();
}

bool GlooCommunicator::spreads_by_doubling(const at::Tensor& tensor, ReduceOp reduce) const {
  const bool is_in_any_order =
      c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) && reduce != ReduceOp::kSum;
  return size() > kMostDirectRanks && static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes && is_in_any_order;
}

void GlooCommunicator::all_reduce(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (spreads_by_doubling(tensor, reduce)) return reduce_by_doubling(op, tensor, reduce);
  if (bytes <= (size() == 2 ? kOneStepBytesOfTwo : kOneStepBytes)) {
    std::vector<at::Tensor> parts(size(), tensor);
    exchange([&](int to) { op.send(tensor, to); },
             [&](int from) { parts[from] = op.receive_new(tensor.numel(), tensor.scalar_type(), from); });
    op.complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
    return;
  }
  const auto counts = even_counts(tensor.numel(), size());
  if (reduces_in_background(tensor)) {
    const auto parts = tensor.split_with_sizes(counts);
    op.reduce_in_background({parts[rank()]}, parts[rank()], reduce, /*publish=*/true);
    exchange([&](int to) { op.send(parts[to], to); }, [](int) {});
    op.next_step();
    exchange([](int) {}, [&](int from) { op.receive(parts[from], from); });
    return op.start_pipeline();
  }
  const Segments parts = parts_of({tensor}, counts);
  op.complete = [this, &op, tensor, own = parts[rank()][0], segments = exchange_parts(op, parts), reduce, counts] {
    reduce_in_rank_order(own, segments[0], reduce);
    op.next_step();
    exchange_shards(op, tensor, own, counts);
    op.wait_for_messages();
  };
}

// After each step a rank has the result over twice as many ranks, the last of them itself (dissemination, Hensgen,
// Finkel and Manber, 1988). Some are counted twice, which changes neither the largest nor the smallest. A peer is met
// once in each direction.
void GlooCommunicator::reduce_by_doubling(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce) {
  const auto start_step = [this, &op, tensor](int distance) {
    op.send(tensor, (rank() + distance) % size());
    return op.receive_new(tensor.numel(), tensor.scalar_type(), (rank() - distance + size()) % size());
  };
  op.complete = [this, &op, tensor, reduce, start_step, received = start_step(1)]() mutable {
    for (int distance = 2;; distance *= 2) {
      reduce_in_rank_order(tensor, {tensor, received}, reduce);
      if (distance >= size()) return;
      received = start_step(distance);
      op.wait_for_messages();
    }
  };
}

void GlooCommunicator::reduce_to_root(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce, int root) {
  if (rank() != root) return op.send(tensor, root);
  if (reduces_in_background(tensor)) {
    op.reduce_in_background({tensor}, tensor, reduce, /*publish=*/false);
    return op.start_pipeline();
  }
  std::vector<at::Tensor> parts(size(), tensor);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != root) parts[peer] = op.receive_new(tensor.numel(), tensor.scalar_type(), peer);
  op.complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
}

void GlooCommunicator::broadcast(GlooOperation& op, const at::Tensor& tensor, int root) {
  if (size() == 2 || static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes)
    return send_parts(op, std::vector<at::Tensor>(size(), tensor), tensor, root);
  // Scatter, then all-gather (van de Geijn): the root sends each element once, not size() times.
  const auto counts = even_counts(tensor.numel(), size());
  const auto parts = tensor.split_with_sizes(counts);
  send_parts(op, parts, parts[rank()], root);
  op.complete = [this, &op, tensor, own = parts[rank()], counts] {
    op.next_step();
    exchange_shards(op, tensor, own, counts);
    op.wait_for_messages();
  };
}

}  // namespace tessera::internal
