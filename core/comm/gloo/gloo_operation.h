#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/shared_memory/peer_memory.h"
#include "core/comm/shared_memory/shared_rounds.h"

namespace tessera::internal {

class GlooCommunicator;

struct GlooMessage {
  c10::intrusive_ptr<c10d::Work> work;  // over TCP: holds the tensor
  PeerMemory::Announced announced;      // in memory: of
  at::Tensor tensor;
  int peer;  // -1: gloo's own collective, with all of them; of a round in shared memory who it waits for, once that is
             // known
  bool is_send;
};

// Tensors whose memory peers may still read or write.
void keep_memory(const std::vector<GlooMessage>& messages, std::vector<at::Tensor>& keeper);

// One operation under way. Its messages belong to one step at a time.
class GlooOperation : public Pending::Operation {
 public:
  GlooOperation(std::shared_ptr<GlooCommunicator> comm, std::string description);
  ~GlooOperation() override;

  // `part`: which of those that go the same way in a step, the same number on both sides.
  void send(const at::Tensor& tensor, int peer, size_t part = 0);
  void receive(const at::Tensor& tensor, int peer, size_t part = 0) {
    start_message(tensor, peer, part, /*is_send=*/false);
  }
  // A tensor [numel] that is kept until the operation is over; and a message into such a one.
  at::Tensor make_staging(int64_t numel, at::ScalarType dtype);
  at::Tensor receive_new(int64_t numel, at::ScalarType dtype, int peer, size_t part = 0);
  void all_reduce_by_gloo(const at::Tensor& tensor);
  // All of the operation, as a round of the group's SharedRounds: see there.
  void begin_round(const SharedRounds::Contribution& own, std::vector<uint64_t> expected,
                   std::function<void(const SharedRounds::Contributions&)> read);
  // The sum of this rank's part, by the thread of pipelines, once start_pipeline() is called: of `own`, segment by
  // segment, and what the others send in this step, into `out`. `publish`: and to all others, in the next step.
  void reduce_in_background(const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp reduce, bool publish);
  void start_pipeline();
  void wait_for_messages();
  void next_step() { ++step_; }
  void drop_messages(std::vector<at::Tensor>* keeper) noexcept;
  void finish() override;

  std::function<void()> complete;  // what is left to do once the first step's messages are through
  const std::string& description() const { return description_; }
  uint64_t sequence() const { return sequence_; }

 private:
  void start_message(const at::Tensor& tensor, int peer, size_t part, bool is_send);
  void wait_for_room();
  bool wait_for(GlooMessage& message, std::string* cause) const;
  PeerMemory::Outcome wait_in_memory(GlooMessage& message, std::string* cause) const;
  void copy_what_is_matched() noexcept;
  void wait_for_pipeline();
  int tag(int peer, bool is_send, int step) const;
  uint64_t memory_tag(size_t part = 0) const;

  const std::shared_ptr<GlooCommunicator> comm_;
  const std::string description_;
  const uint32_t fingerprint_;
  const uint64_t sequence_;
  int step_ = 0;
  std::chrono::steady_clock::time_point deadline_;  // once it is waited for
  std::vector<GlooMessage> messages_;
  std::vector<at::Tensor> staging_;
  std::shared_ptr<ReductionPipeline> pipeline_;
  std::shared_ptr<SharedRounds::Round> round_;
  std::atomic<bool> is_aborted_ = false;  // the group was closed before its messages were through
};

}  // namespace tessera::internal
