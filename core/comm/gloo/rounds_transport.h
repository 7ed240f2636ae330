#pragma once

#include <functional>
#include <memory>

#include "core/comm/gloo/transport.h"
#include "core/comm/group_process.h"
#include "core/comm/shared_memory/shared_rounds.h"

namespace tessera::internal {

// Carries small gathers and reductions, each as one round of SharedRounds. All ranks must share memory.
class RoundsTransport : public Transport {
 public:
  // `memory` must reach all ranks.
  explicit RoundsTransport(std::shared_ptr<PeerMemory> memory) : memory_(std::move(memory)), rounds_(*memory_) {}

  bool carries(const Collective& collective) const override;
  std::shared_ptr<TransportMessage> await_room() override;
  StartedCollective start_collective(const Collective& collective, const MessageTag& tag) override;
  int64_t max_eager_numel() const override { return rounds_.plan().most_numel(); }

 private:
  class Wait;
  class Room;
  class Message;
  struct Part {  // contribution of this rank to a round, and the expected contributions of all ranks
    SharedRounds::Contribution own;
    std::vector<uint64_t> expected_bytes;  // bytes that each rank contributes, by rank
    std::function<void(const SharedRounds::Contributions&)> read;
  };
  Part gather(const Collective& collective) const;
  Part reduce(const Collective& collective) const;
  int64_t bytes_sent_as_messages(const Collective& collective) const;
  int rank() const { return memory_->rank(); }
  int size() const { return memory_->board()->ranks(); }

  const GroupProcess process_;
  const std::shared_ptr<PeerMemory> memory_;
  SharedRounds rounds_;
};

}  // namespace tessera::internal
