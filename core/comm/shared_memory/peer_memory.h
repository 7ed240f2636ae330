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

// Messages between ranks of one host that go straight from one's memory into the other's: one copy, no socket, no
// thread, no staging.
//
// A message is announced by both sides on a board that the ranks share (shared_board.h): where the tensor lies, and a
// tag. Either may then copy, by process_vm_writev or process_vm_readv, or memcpy where ranks are threads of one
// process: who waits copies what nobody else does of all messages of the operation, what it receives first. So of two
// that wait each copies its half, and one that comes late finds all done. A small message is copied by who announces it
// second, which is sooner done than looked at again. (Cross-memory attach, as Open MPI and UCX move messages within a
// host.)
//
// Linux alone has the calls; a kernel or a container may forbid them. connect() tries them and leaves out what does not
// work. Under Yama's ptrace_scope 1, if permitted, it lets processes that descend from the ranks' nearest common
// ancestor, the launcher, attach to this one for as long as the group lives (tracer_permission.h).
class PeerMemory {
 public:
  // A message that this rank announced; without a slot it is over.
  struct Announcement {
    SharedBoard::Slot* slot;
    const SharedBoard::State kind;
    void* const data;
    const uint64_t bytes, tag;
    const int peer;
    PublishedMemory published;  // to a peer of this process
  };
  using Announced = std::shared_ptr<Announcement>;  // null: over at once
  struct Process;                                   // of a peer

  enum class Outcome { kDone, kInterrupted, kTimedOut, kPeerLeft, kPeerDied, kOtherBytes };

  // The memory of a peer cannot be reached any more.
  struct Unreachable : std::runtime_error {
    Unreachable(int rank, const char* why) : std::runtime_error(why), peer(rank) {}
    int peer;
  };

  // Finds out through the store which ranks share a host and whether they reach each other's memory; all or none of a
  // host's ranks do. Null if no other rank is reached. `permits_tracing`: gives the host's ranks a TracerPermission.
  // Collective; `is_wanted` and `permits_tracing` may differ.
  static std::unique_ptr<PeerMemory> connect(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
                                             bool is_wanted, bool permits_tracing = false);
  ~PeerMemory();

  // How often a rank that waits asks whether its peers still live.
  static constexpr std::chrono::milliseconds kAskEvery{50};
  // How long it looks for news before it sleeps: waking up costs about as much.
  static constexpr std::chrono::microseconds kSpin{30};
  // Messages up to here are small.
  static constexpr uint64_t kAtOnceBytes = 1 << 16;

  int rank() const { return rank_; }
  bool reaches(int peer) const { return local_[peer] >= 0; }
  // Every rank of the group: then all ranks do.
  bool reaches_all() const { return board_->ranks() == static_cast<int>(local_.size()); }

  // The peer's message with the same tag gets, or gives, the tensor's bytes. The tensor is contiguous, on the CPU, and
  // stays alive and as it is until wait() or close(). Throws Unreachable, or std::runtime_error if the peer has another
  // number of bytes for this tag. A rank that is a thousand messages ahead of its peer waits for it here, at most the
  // timeout. Tags whose upper halves are equal are of one operation.
  Announced send(const at::Tensor& tensor, int peer, uint64_t tag) {
    return announce(SharedBoard::kSend, tensor, peer, tag);
  }
  Announced receive(const at::Tensor& tensor, int peer, uint64_t tag) {
    return announce(SharedBoard::kReceive, tensor, peer, tag);
  }

  using Deadline = SharedBoard::Deadline;

  // Returns when the message is over, or then. After anything but kDone it is still announced: close() follows. Throws
  // Unreachable, as of any peer of a message of its operation.
  Outcome wait(const Announced& message, Deadline until);
  Outcome wait(const Announced& message) { return wait(message, std::chrono::steady_clock::now() + timeout_); }

  // Copies the message now, if both sides have announced it and nobody does. Throws Unreachable.
  void copy_if_matched(const Announced& message);
  // What this rank has copied, of what it sent or received.
  uint64_t copied_bytes() const { return copied_bytes_; }

  // Makes a wait() of another thread return kInterrupted, or the next one. Thread-safe.
  void interrupt();
  void clear_interrupt() { interrupted_.store(false); }

  // For who waits beside it on the same board.
  const std::shared_ptr<SharedBoard>& board() const { return board_; }
  bool is_interrupted() const { return interrupted_.load(); }
  bool has_left(int peer) const { return member(peer).has_left.load() != 0; }  // it will not touch anything any more
  bool is_alive(int peer) const;                                               // its process
  bool may_spin() const { return may_spin_; }

  // Takes back what was announced and is not being copied, so that no peer touches this rank's memory once this has
  // returned; waits of peers for it end. False if a peer that copies has not ended within a second: it is stopped, and
  // goes on when it is continued, so what was announced has to stay where it is for as long as the process lives.
  // Thread-safe, and more than once.
  bool close() noexcept;

 private:
  struct Peer;  // what is known of another rank's process
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
  const std::vector<int> local_;  // a rank's number on this host, -1 on others
  const std::shared_ptr<SharedBoard> board_;
  const std::vector<Peer> peers_;                 // by their numbers on this host
  std::unique_ptr<TracerPermission> permission_;  // until close()
  const std::chrono::milliseconds timeout_;
  const bool may_spin_;               // a processor is there for every rank
  std::vector<Announced> announced_;  // and some that are over
  size_t reap_at_ = 64;
  uint64_t copied_bytes_ = 0;
  std::atomic<bool> interrupted_ = false;
  std::atomic<bool> may_be_touched_ = false;  // after close()
};

}  // namespace tessera::internal
