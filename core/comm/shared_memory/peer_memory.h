#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/comm/shared_memory/published_memory.h"
#include "core/comm/shared_memory/shared_board.h"
#include "core/comm/shared_memory/tracer_permission.h"

namespace tessera::internal {

// Returns the time for which a waiting rank polls before it sleeps. Between polls, the rank yields its core. If each
// rank computes in one thread, the yield hands the core to a rank that has work, without the delay of waking a sleeper.
// (Open MPI and MPICH poll without end.) If many ranks share a core, a rank does not poll, because polls take time. If
// ranks have several threads, a rank polls at most as long as waking up takes, because polls delay the other threads.
constexpr std::chrono::microseconds poll_time(int ranks, int cores, int threads) {
  if (ranks > 2 * cores) return std::chrono::microseconds(0);
  return std::chrono::microseconds(threads == 1 ? 1000 : ranks <= cores ? 30 : 0);
}

// Copies messages between ranks of one host directly from memory to memory: one copy, without socket or staging buffer.
//
// Both sides announce a message on a board that the ranks share (shared_board.h), with the address of the tensor and a
// tag. Either side may then copy, by process_vm_writev or process_vm_readv, or by memcpy if the ranks are threads of
// one process. A waiting rank copies every message of the operation that no other rank has claimed, its own receives
// first. So two waiting ranks share the work, and a rank that waits last has nothing left to copy. A small message is
// copied at once by the side that announces it second. (Open MPI and UCX call this cross-memory attach.)
//
// Only Linux has these calls, and a kernel or container may forbid them. connect() tries them, and if they fail on a
// host, connects none of its ranks. Yama's ptrace_scope 1 requires `permits_tracing`: while the group exists, the
// descendants of the ranks' nearest common ancestor, the launcher, may attach to this process (tracer_permission.h).
class PeerMemory {
 public:
  // A message that this rank has announced. `slot` is null once the message is complete.
  struct Announcement {
    SharedBoard::Slot* slot;
    const SharedBoard::State kind;
    void* const data;
    const uint64_t bytes, tag;
    const int peer;
    PublishedMemory published;  // memory for a peer that is a thread of this process; otherwise empty
  };
  using Announced = std::shared_ptr<Announcement>;  // null if the message is already complete
  struct Process;                                   // the process of a peer

  enum class Outcome { kDone, kInterrupted, kTimedOut, kPeerLeft, kPeerDied, kOtherBytes };

  // Thrown if the memory of a peer can no longer be reached.
  struct Unreachable : std::runtime_error {
    Unreachable(int rank, const char* why) : std::runtime_error(why), peer(rank) {}
    int peer;
  };

  // Connects the ranks of this host for which `is_wanted` is true. Returns null if this rank or all others take no
  // part, or if one of them cannot reach another's memory. `permits_tracing` may let them access this process's memory.
  // Both may differ between ranks. Collective. Throws std::exception if a rank is missing after `timeout`.
  static std::unique_ptr<PeerMemory> connect(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
                                             bool is_wanted, bool permits_tracing = false);
  ~PeerMemory();

  // Interval at which a waiting rank checks that its peers are alive.
  static constexpr std::chrono::milliseconds kAskEvery{50};
  // Largest size, in bytes, of a message that is copied by the side that announces it second.
  static constexpr uint64_t kAtOnceBytes = 1 << 16;

  int rank() const { return rank_; }
  bool reaches(int peer) const { return local_[peer] >= 0; }
  // Whether this object reaches every rank of the group. The answer is the same on all ranks.
  bool reaches_all() const { return board_->ranks() == static_cast<int>(local_.size()); }

  // Announces a message: the tensor's bytes are sent to, or received from, the peer's message with the same tag. The
  // tensor must be contiguous, on the CPU, and stay alive and unchanged until wait() or close(). The upper half of a
  // tag identifies the operation. If the channel to the peer is full (1024 messages), blocks until there is room.
  // Throws Unreachable if a copy fails. Throws std::runtime_error if that wait fails, if this rank has left, or if the
  // peer has announced another number of bytes.
  Announced send(const at::Tensor& tensor, int peer, uint64_t tag) {
    return announce(SharedBoard::kSend, tensor, peer, tag);
  }
  Announced receive(const at::Tensor& tensor, int peer, uint64_t tag) {
    return announce(SharedBoard::kReceive, tensor, peer, tag);
  }

  using Deadline = SharedBoard::Deadline;

  // Blocks until the message is complete or the deadline passes. After any outcome but kDone the message is still
  // announced, and close() must be called. Throws Unreachable if a message of the operation could not be copied.
  Outcome wait(const Announced& message, Deadline until);
  Outcome wait(const Announced& message) { return wait(message, RunClock::now() + timeout_); }

  // Copies the message now if both sides have announced it and no rank copies it yet. Throws Unreachable on failure.
  void copy_if_matched(const Announced& message);
  // Returns the number of bytes that this rank has copied, without the copies by its peers.
  uint64_t copied_bytes() const { return copied_bytes_; }

  // Until clear_interrupt(), makes wait() return kInterrupted if the message is incomplete. Thread-safe.
  void interrupt();
  void clear_interrupt() { interrupted_.store(false); }

  // These functions are for SharedRounds, which waits on the same board.
  const std::shared_ptr<SharedBoard>& board() const { return board_; }
  bool is_interrupted() const { return interrupted_.load(); }
  bool has_left(int peer) const { return member(peer).has_left.load() != 0; }  // the peer accesses no memory any more
  bool is_alive(int peer) const;                                               // whether the peer's process is running
  std::chrono::microseconds poll_time() const;  // for the current number of this process's intra-operator threads

  // Cancels all messages that are not being copied, and ends the peers' waits for them. Blocks for copies in flight, at
  // most a second. Returns true if no peer will access this rank's memory. If a copy is still in flight, returns false:
  // announced tensors must then live as long as the process. Later calls only return the first result. Thread-safe.
  bool close() noexcept;

 private:
  struct Peer;  // a Process, with a descriptor that detects its end
  PeerMemory(int rank, std::vector<int> local, std::shared_ptr<SharedBoard> board, std::vector<Peer> peers,
             std::unique_ptr<TracerPermission> permission, std::chrono::milliseconds timeout);
  Announced announce(SharedBoard::State kind, const at::Tensor& tensor, int peer, uint64_t tag);
  void copy_claimed(Announcement& message);
  template <class IsMeant>
  void copy_all_matched(IsMeant is_meant);
  void copy(bool to_peer, void* own, uint64_t theirs, uint64_t bytes, int peer) const;
  template <class IsOver>
  Outcome watch(int peer, uint64_t operation, Deadline until, IsOver is_over);
  bool reap();
  SharedBoard::Member& member(int peer) const { return board_->member(local_[peer]); }

  const int rank_;
  const std::vector<int> local_;  // indexed by rank: the rank's number on this host, or -1
  const std::shared_ptr<SharedBoard> board_;
  const std::vector<Peer> peers_;                 // indexed by number on this host
  std::unique_ptr<TracerPermission> permission_;  // lets peers access this process's memory, until close()
  const std::chrono::milliseconds timeout_;
  const int cores_;                   // number of cores that this process may use
  std::vector<Announced> announced_;  // this rank's messages; some may be complete
  size_t reap_at_ = 64;
  uint64_t copied_bytes_ = 0;
  std::atomic<bool> interrupted_ = false;
  std::atomic<bool> may_be_touched_ = false;  // whether a peer may still copy; set by close()
};

// Returns the text of an outcome other than kDone; "" for an interrupted wait, whose cause the watchdog reports.
std::string cause_of(PeerMemory::Outcome outcome);

}  // namespace tessera::internal
