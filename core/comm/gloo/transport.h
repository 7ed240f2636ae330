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

// Why a message did not complete.
struct MessageFailure {
  int peer;  // -1: unknown
  bool is_send;
  std::string cause;  // "": the wait was interrupted, or the watchdog knows the cause
};

// The timeout of a wait that another thread must end.
inline constexpr auto kUntilInterrupted = std::chrono::hours(24 * 365);

// Identifies a message between two ranks. Both sides compute the same tag.
struct MessageTag {
  uint64_t sequence = 0;     // number of the operation in its group
  uint32_t fingerprint = 0;  // hash of the operation's description
  int step = 0;              // of the operation
  size_t part = 0;           // number among the messages of one step to one peer
};

// A wait of the rank's thread that the watchdog's thread can end.
class InterruptibleWait {
 public:
  virtual ~InterruptibleWait() = default;
  // Makes the current wait return, or the next one if there is none. Thread-safe.
  virtual void interrupt() noexcept = 0;
  // Returns why the awaited data can never arrive; "" if it can. Called by the watchdog's thread during a long wait.
  virtual std::string why_disconnected() { return ""; }
};

// A message, or a whole collective, that a transport has started.
class TransportMessage : public InterruptibleWait {
 public:
  using Deadline = RunClock::time_point;

  TransportMessage(int peer, bool is_send) : peer_(peer), is_send_(is_send) {}

  // Blocks until the message is complete, and returns nullopt. Returns the failure if it is interrupted, passes the
  // deadline, or cannot complete; the group must be closed then. Throws the transport's exceptions.
  virtual std::optional<MessageFailure> wait(Deadline until) = 0;
  // Clears an earlier interrupt(). Called before wait(), under the lock that serializes it with interrupt().
  virtual void prepare_wait() {}
  // Completes the message if that needs no wait. Returns false if a peer still needs the message.
  virtual bool complete_without_waiting() noexcept { return false; }
  // The tensor that a peer may access directly while the message is incomplete; undefined if there is none.
  virtual at::Tensor exposed_tensor() const { return {}; }

  int peer() const { return peer_; }  // -1: several
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
// Messages and collectives are started by one thread at a time, except by a transport whose max_eager_numel() is not 0:
// the thread of ReductionPipeline starts messages there too. Other functions are thread-safe.
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

  // Whether start_collective() takes this operation. All ranks must give the same answer.
  virtual bool carries(const Collective& /*collective*/) const { return false; }
  // A wait that must complete before start_collective(); null if there is none.
  virtual std::shared_ptr<TransportMessage> await_room() { return nullptr; }
  struct StartedCollective {
    std::shared_ptr<TransportMessage> message;  // null: already complete
    int64_t sent_bytes;
  };
  virtual StartedCollective start_collective(const Collective& /*collective*/, const MessageTag& /*tag*/) {
    throw std::logic_error("this transport carries no collectives");
  }

  // Operations on full tensors of at most this size move data before they are awaited. 0: no operation does.
  virtual int64_t max_eager_numel() const = 0;

  // Returns a reachable rank whose process has ended, or -1 if none is known.
  virtual int ended_rank() const { return -1; }

  // Closing has two phases. withdraw() takes back all incomplete messages, so that no peer accesses their tensors any
  // more. It returns false if a stopped peer still can; the tensors must then live as long as the process. Then the
  // messages are destroyed, and disconnect() ends the waits of the peers.
  virtual bool withdraw() noexcept { return true; }
  virtual void disconnect() noexcept {}
};

// Makes the transports of a group and its parts, if a library of the program moves their bytes (core/comm/guest).
class TransportSource {
 public:
  virtual ~TransportSource() = default;
  // Not collective. May be called by any thread.
  virtual std::unique_ptr<Transport> make() = 0;
  // Returns the source for a part of the group: these ranks of it. `name` is unique among the parts.
  virtual std::shared_ptr<TransportSource> part(const std::string& name, const std::vector<int>& members) = 0;
};

}  // namespace tessera::internal
