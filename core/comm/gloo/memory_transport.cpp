#include "core/comm/gloo/memory_transport.h"

#include <utility>

namespace tessera::internal {

uint64_t memory_tag(const MessageTag& tag) {
  // The factor is odd, so the parts of a step have different tags.
  const uint32_t of_part = tag.fingerprint + static_cast<uint32_t>(tag.part) * 0x9e3779b9U;
  return tag.sequence << 34 | static_cast<uint64_t>(tag.step) << 32 | of_part;
}

class MemoryTransport::Message : public TransportMessage {
 public:
  Message(PeerMemory& memory, PeerMemory::Announced announced, at::Tensor tensor, int peer, bool is_send)
      : TransportMessage(peer, is_send),
        memory_(memory),
        announced_(std::move(announced)),
        tensor_(std::move(tensor)) {}

  std::optional<MessageFailure> wait(Deadline until) override {
    try {
      const auto outcome = memory_.wait(announced_, until);
      if (outcome == PeerMemory::Outcome::kDone) return std::nullopt;
      return failure(cause_of(outcome));
    } catch (const PeerMemory::Unreachable& error) {  // error.peer may be the peer of another message of the operation
      return MessageFailure{error.peer, is_send(), error.what()};
    }
  }
  void prepare_wait() override { memory_.clear_interrupt(); }
  void interrupt() noexcept override { memory_.interrupt(); }
  bool complete_without_waiting() noexcept override {
    try {
      memory_.copy_if_matched(announced_);
    } catch (const PeerMemory::Unreachable&) {  // the slot is marked as broken, which the next wait() reports
    }
    return announced_->slot == nullptr;
  }
  at::Tensor exposed_tensor() const override { return tensor_; }

 private:
  PeerMemory& memory_;
  const PeerMemory::Announced announced_;
  const at::Tensor tensor_;
};

void MemoryTransport::start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
                            TransportMessages& started) {
  const uint64_t number = memory_tag(tag);
  auto announced = is_send ? memory_->send(tensor, peer, number) : memory_->receive(tensor, peer, number);
  if (announced) started.push_back(std::make_shared<Message>(*memory_, std::move(announced), tensor, peer, is_send));
}

int MemoryTransport::ended_rank() const {
  for (int peer = 0; peer < size_; ++peer)
    if (memory_->reaches(peer) && !memory_->is_alive(peer)) return peer;
  return -1;
}

}  // namespace tessera::internal
