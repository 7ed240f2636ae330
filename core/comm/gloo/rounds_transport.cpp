#include "core/comm/gloo/rounds_transport.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "core/comm/gloo/gloo_collectives.h"
#include "core/comm/gloo/memory_transport.h"
#include "core/comm/rank_order_sum.h"
#include "core/comm/traffic.h"

namespace tessera::internal {

class RoundsTransport::Wait : public TransportMessage {
 public:
  explicit Wait(RoundsTransport& transport) : TransportMessage(/*peer=*/-1, /*is_send=*/false), transport_(transport) {}

  void prepare_wait() override { transport_.memory_->clear_interrupt(); }
  void interrupt() noexcept override { transport_.memory_->interrupt(); }

 protected:
  static std::optional<MessageFailure> result(PeerMemory::Outcome outcome, int peer) {
    if (outcome == PeerMemory::Outcome::kDone) return std::nullopt;
    return MessageFailure{peer, /*is_send=*/false, cause_of(outcome)};
  }
  RoundsTransport& transport_;
};

// Waits until the other ranks are fewer than SharedRoundsPlan::kRounds rounds behind.
class RoundsTransport::Room : public Wait {
 public:
  using Wait::Wait;
  std::optional<MessageFailure> wait(Deadline until) override {
    int peer = -1;
    const auto outcome = transport_.rounds_.make_room(until, peer);
    return result(outcome, peer);
  }
};

class RoundsTransport::Message : public Wait {
 public:
  Message(RoundsTransport& transport, std::shared_ptr<SharedRounds::Round> round)
      : Wait(transport), round_(std::move(round)) {}
  ~Message() override {
    if (transport_.process_.is_this()) transport_.rounds_.drop(*round_);
  }

  std::optional<MessageFailure> wait(Deadline until) override {
    int peer = -1;
    const auto outcome = transport_.rounds_.wait(*round_, until, peer);
    return result(outcome, peer);
  }
  bool complete_without_waiting() noexcept override { return true; }  // peers read this rank's slot, not its tensor

 private:
  const std::shared_ptr<SharedRounds::Round> round_;
};

bool RoundsTransport::carries(const Collective& collective) const {
  if (collective.numel == 0 || !collective.pieces.empty()) return false;
  switch (collective.kind) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
      return collective.numel <= rounds_.plan().most_numel();
    case Collective::kAllReduce:
    case Collective::kReduce:
      return rounds_.plan().reduces(collective.numel, static_cast<int64_t>(collective.full.nbytes()));
    default:
      return false;
  }
}

std::shared_ptr<TransportMessage> RoundsTransport::await_room() {
  return rounds_.has_room() ? nullptr : std::make_shared<Room>(*this);
}

Transport::StartedCollective RoundsTransport::start_collective(const Collective& collective, const MessageTag& tag) {
  Part part = collective.kind == Collective::kAllGather ? gather(collective) : reduce(collective);
  const bool is_read = part.read != nullptr;
  auto round = rounds_.begin(memory_tag(tag), part.own, std::move(part.expected_bytes), std::move(part.read));
  return {is_read ? std::make_shared<Message>(*this, std::move(round)) : nullptr, bytes_sent_as_messages(collective)};
}

RoundsTransport::Part RoundsTransport::gather(const Collective& collective) const {
  const at::Tensor &full = collective.full, &shard = collective.shard;
  const auto& counts = collective.counts;
  const auto element_bytes = static_cast<uint64_t>(full.element_size());
  std::vector<uint64_t> bytes;
  for (const int64_t count : counts) bytes.push_back(static_cast<uint64_t>(count) * element_bytes);
  auto* const all = static_cast<std::byte*>(full.mutable_data_ptr());
  const uint64_t own_begin = std::accumulate(bytes.begin(), bytes.begin() + rank(), uint64_t{0});
  if (shard.nbytes() > 0 && all + own_begin != shard.const_data_ptr())
    std::memcpy(all + own_begin, shard.const_data_ptr(), shard.nbytes());
  const auto read = [full, all, bytes](const SharedRounds::Contributions& shards) {
    std::byte* place = all;
    for (size_t peer = 0; peer < shards.size(); place += bytes[peer++])
      if (shards[peer] != nullptr && bytes[peer] > 0) std::memcpy(place, shards[peer], bytes[peer]);
  };
  return {{shard.const_data_ptr(), shard.nbytes()}, bytes, read};
}

// In a reduce-scatter, a rank reads only its part of the other ranks' tensors; in other reductions, the whole tensors.
RoundsTransport::Part RoundsTransport::reduce(const Collective& collective) const {
  const auto kind = collective.kind;
  const at::Tensor &full = collective.full, &shard = collective.shard;
  const auto& counts = collective.counts;
  const ReduceOp op = collective.op;
  const bool has_parts = kind == Collective::kReduceScatter;
  const at::Tensor& out = has_parts ? shard : full;
  const auto element_bytes = static_cast<uint64_t>(full.element_size());
  const uint64_t begin =
      has_parts
          ? element_bytes * static_cast<uint64_t>(std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0}))
          : 0;
  const bool gives = kind != Collective::kReduce || rank() != collective.root;
  const bool gets = (kind != Collective::kReduce || rank() == collective.root) && out.numel() > 0;
  Part part{{full.const_data_ptr(), gives ? full.nbytes() : 0},
            std::vector<uint64_t>(static_cast<size_t>(size()), full.nbytes()),
            nullptr};
  if (has_parts) part.own.unread_begin = begin, part.own.unread_bytes = out.nbytes();
  if (gets)
    part.read = [full, out, begin, op](const SharedRounds::Contributions& contributions) {
      const auto* const mine = static_cast<const std::byte*>(full.const_data_ptr());
      std::vector<const void*> parts;
      for (const std::byte* contribution : contributions)
        parts.push_back((contribution == nullptr ? mine : contribution) + begin);
      reduce_in_rank_order(out.mutable_data_ptr(), parts, out.numel(), out.scalar_type(), op);
    };
  return part;
}

// Returns the bytes that messages would send, so that Traffic does not depend on the transport.
int64_t RoundsTransport::bytes_sent_as_messages(const Collective& collective) const {
  if (collective.kind != Collective::kAllReduce) return bytes_sent(collective, rank(), size());
  const bool doubles = spreads_by_doubling(collective.full, collective.op, size());
  return static_cast<int64_t>(collective.full.nbytes()) *
         (doubles ? std::bit_width(static_cast<unsigned>(size() - 1)) : size() - 1);
}

}  // namespace tessera::internal
