#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/collective.h"
#include "core/runtime/run_clock.h"

namespace tessera::internal {

// Describes why a message did not complete.
struct MessageFailure {
  int peer;  // the other rank of the message; -1 if unknown
  bool is_send;
  std::string cause;  // "" if the wait was interrupted, or if the watchdog reports the cause
};

// Timeout of a wait that another thread must end by interrupt().
inline constexpr auto kUntilInterrupted = std::chrono::hours(24 * 365);

// Identifies a message between two ranks. Both sides compute the same tag.
struct MessageTag {
  uint64_t sequence = 0;     // number of the operation in its group
  uint32_t fingerprint = 0;  // hash of the operation's description
  int step = 0;              // number of the step in its operation
  size_t part = 0;           // number of the message among the messages of one step to one peer
};

// A wait of the rank's thread that the watchdog's thread can end.
class InterruptibleWait {
 public:
  virtual ~InterruptibleWait() = default;
  // Makes the current wait return. If there is none, makes the next wait return. Thread-safe.
  virtual void interrupt() noexcept = 0;
  // Returns the reason why the awaited data can never arrive, or "". The watchdog's thread calls this in a long wait.
  virtual std::string why_disconnected() { return ""; }
};

// A message, or a whole collective, that a transport has started.
class TransportMessage : public InterruptibleWait {
 public:
  using Deadline = RunClock::time_point;

  TransportMessage(int peer, bool is_send) : peer_(peer), is_send_(is_send) {}

  // Blocks until the message is complete, and returns nullopt. If the wait is interrupted or passes the deadline, or
  // the message cannot complete, returns the failure; the caller must then close the group. May throw std::exception.
  virtual std::optional<MessageFailure> wait(Deadline until) = 0;
  // Clears an earlier interrupt(). Called before wait(), under the lock that also serializes calls of interrupt().
  virtual void prepare_wait() {}
  // Completes the message if that needs no wait. Returns false if a peer still needs the message.
  virtual bool complete_without_waiting() noexcept { return false; }
  // Returns the tensor that a peer may access directly while the message is incomplete; undefined if there is none.
  virtual at::Tensor exposed_tensor() const { return {}; }

  int peer() const { return peer_; }  // -1 if the message has several peers
  bool is_send() const { return is_send_; }

 protected:
  MessageFailure failure(std::string cause) const { return {peer_, is_send_, std::move(cause)}; }

 private:
  const int peer_;
  const bool is_send_;
};

using TransportMessages = std::vector<std::shared_ptr<TransportMessage>>;

// Moves bytes between the ranks of a gloo group. An implementation carries single messages to the peers that it
// reaches, or whole collectives, or both. GlooTransports lists the implementations of a group.
//
// start() and start_collective() must be called by one thread at a time. Exception: if max_eager_numel() is not 0,
// PipelineThread's thread may call start() concurrently with that thread. Other functions are thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual bool reaches(int /*peer*/) const { return false; }
  // Starts sending or receiving the tensor's bytes, as one or several messages, and appends these to `started`.
  // `tensor` is flat, contiguous and on the CPU. It must stay alive and unchanged until the messages are complete or
  // the transport is closed. Throws std::exception if the peer cannot be reached or expects another number of bytes.
  virtual void start(const at::Tensor& /*tensor*/, int /*peer*/, bool /*is_send*/, const MessageTag& /*tag*/,
                     TransportMessages& /*started*/) {
    throw std::logic_error("this transport carries no single messages");
  }

  // Whether start_collective() can run this operation. Must return the same value on all ranks.
  virtual bool carries(const Collective& /*collective*/) const { return false; }
  // Returns a wait that must complete before start_collective(); null if no wait is needed.
  virtual std::shared_ptr<TransportMessage> await_room() { return nullptr; }
  struct StartedCollective {
    std::shared_ptr<TransportMessage> message;  // null if the collective is already complete
    int64_t sent_bytes;
  };
  virtual StartedCollective start_collective(const Collective& /*collective*/, const MessageTag& /*tag*/) {
    throw std::logic_error("this transport carries no collectives");
  }

  // Returns the size, in elements, of the largest full tensor that moves before it is awaited; 0 if none does.
  virtual int64_t max_eager_numel() const = 0;

  // Returns a reachable rank whose process has ended, or -1 if none is known.
  virtual int ended_rank() const { return -1; }

  // A group closes in two phases. First, withdraw() cancels all incomplete messages, so that no peer accesses their
  // tensors any more. If a stopped peer may still access tensors, withdraw() returns false, and these tensors must live
  // as long as the process. Second, after the messages are destroyed, disconnect() ends the waits of the peers.
  virtual bool withdraw() noexcept { return true; }
  virtual void disconnect() noexcept {}
};

}  // namespace tessera::internal
