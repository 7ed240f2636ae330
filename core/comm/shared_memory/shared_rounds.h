#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/comm/shared_memory/peer_memory.h"
#include "core/comm/shared_memory/shared_rounds_plan.h"

namespace tessera::internal {

// Runs small operations among ranks that all share memory, each as one round. A rank copies its contribution to a slot
// of the shared memory and counts itself in; in wait() it reads the contributions of the others. So an operation costs
// one copy in, one copy out and one wait, whatever the number of ranks. (As in the shared-memory collectives of Open
// MPI and MPICH.)
//
// All ranks begin rounds in one order, which numbers them. A rank leaves a round when it has read the contributions, or
// never will: it needs none, or its handle was dropped.
//
// [Note: no cycle of waits] To begin round R, a rank waits only for room: all ranks must have left round R - kRounds.
// First the rank itself leaves that round: it reads the contributions into the operation's results, which are not
// accessed before wait(). Then it waits for the others. Among the waiting ranks, consider one that has begun the fewest
// rounds, R. Its wait ends, because the awaited data exists or a running rank provides it:
// - To read a round before R: all waiting ranks have begun it, so their contributions are there.
// - For others to leave round R - kRounds: a rank that has begun R has left that round. Another one is about to begin
//   R, and leaves first, since all have begun the round that it leaves; or it waits for a round before R, which is
//   there.
//
// This also holds for several groups if "begun" is counted in the order in which all ranks begin the operations of all
// groups. Messages exist beside rounds; their first step only needs the peers to have begun. An operation of two steps
// needs its peers to have reached its wait. If ranks wait in one order, that holds. Ranks that are more than kRounds
// rounds apart and wait in different orders may deadlock.
//
// If a peer dies, its contribution is missing or stays readable. Used by one thread.
class SharedRounds {
 public:
  using Outcome = PeerMemory::Outcome;
  using Deadline = PeerMemory::Deadline;
  // By rank; null for this rank.
  using Contributions = std::vector<const std::byte*>;
  struct Round;

  // `memory` must reach all ranks, and outlive this object.
  explicit SharedRounds(PeerMemory& memory);
  const SharedRoundsPlan& plan() const { return plan_; }

  // Blocks until another round can begin; has_room() returns whether there is room already. After any outcome but
  // kDone, `peer` is the cause or -1, and the group is unusable.
  bool has_room();
  Outcome make_room(Deadline until, int& peer);

  // This rank's contribution: `bytes` at `data`, except for a part that no other rank reads.
  struct Contribution {
    const void* data = nullptr;
    uint64_t bytes = 0;
    uint64_t unread_begin = 0, unread_bytes = 0;
  };
  // Begins a round, for which there must be room. Copies the data before it returns. All ranks must pass the same tag,
  // and in `expected` the bytes that each rank contributes. `read` is called in wait() or make_room() when all
  // contributions are there. If it is null, this rank needs no contributions, and leaves the round at once.
  std::shared_ptr<Round> begin(uint64_t tag, const Contribution& own, std::vector<uint64_t> expected,
                               std::function<void(const Contributions&)> read);

  // Blocks until the round has been read. If another rank begins the round with another tag, ranks have diverged, and
  // the call blocks until the watchdog interrupts it.
  Outcome wait(Round& round, Deadline until, int& peer);
  // Leaves a round without reading it.
  void drop(Round& round);

 private:
  struct Participant;

  template <class IsOver, class IsAwaited>
  Outcome watch(Deadline until, int& peer, IsOver is_over, IsAwaited is_awaited) const;
  bool all_have_come(const Round& round) const;
  bool has_come(const Round& round, int rank) const;
  void leave(Round& round);
  uint64_t left_by_others() const;
  template <class T>
  T& at(size_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  PeerMemory& memory_;
  const std::shared_ptr<SharedBoard> board_;
  std::byte* const base_;
  const int rank_, ranks_;
  const SharedRoundsPlan plan_;
  std::vector<std::shared_ptr<Round>> rounds_;  // in flight, by number modulo kRounds
  uint64_t begun_ = 0, left_ = 0;               // all rounds before this number
  uint64_t left_by_others_ = 0;                 // as last read
  RoundSlots slots_;
  Contributions contributions_;
};

}  // namespace tessera::internal
