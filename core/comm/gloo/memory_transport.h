#pragma once

#include <memory>

#include "core/comm/gloo/transport.h"
#include "core/comm/shared_memory/peer_memory.h"

namespace tessera::internal {

// Carries messages between the ranks of one host through PeerMemory.
class MemoryTransport : public Transport {
 public:
  MemoryTransport(std::shared_ptr<PeerMemory> memory, int size) : memory_(std::move(memory)), size_(size) {}

  bool reaches(int peer) const override { return memory_->reaches(peer); }
  void start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
             TransportMessages& started) override;
  int64_t max_eager_numel() const override { return 0; }
  int ended_rank() const override;
  bool withdraw() noexcept override { return memory_->close(); }

 private:
  class Message;
  const std::shared_ptr<PeerMemory> memory_;
  const int size_;
};

// Returns a message's tag for PeerMemory, which matches messages only by tag. So each part of a step has its own tag.
uint64_t memory_tag(const MessageTag& tag);

}  // namespace tessera::internal
