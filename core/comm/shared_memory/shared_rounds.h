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
// of the shared memory and increments the round's number of arrivals. In wait() it reads the contributions of the other
// ranks. So an operation costs one copy in, one copy out and one wait, whatever the number of ranks. (The shared-memory
// collectives of Open MPI and MPICH do the same.)
//
// All ranks begin rounds in the same order, which determines the numbers of the rounds. A rank leaves a round after it
// has read the contributions. If a rank needs no contributions, or has dropped the round, it leaves without reading.
//
// [Note: no cycle of waits] A rank begins round R only when there is room: when all ranks have left round R - kRounds.
// First the rank itself leaves that round: it reads the contributions into the operation's results, which are not
// accessed before wait(). Then it waits for the others. Among the waiting ranks, consider one that has begun the fewest
// rounds, say R. Its wait ends, because the awaited data exists or a running rank provides it:
// - It may wait to read a round before R. All waiting ranks have begun that round, so their contributions exist.
// - It may wait until another rank leaves round R - kRounds. If that rank has begun more than R rounds, it has left
//   round R - kRounds. If it has begun R rounds, it is about to leave round R - kRounds, which all ranks have begun, or
//   it waits to read a round before R, whose contributions exist.
//
// The proof also holds for several groups, if rounds are counted in the order in which all ranks begin the operations
// of all groups. Other operations use messages. Their first step only needs the peers to have begun the operation. A
// second step needs the peers to have reached their wait, which holds if all ranks wait in one order. Ranks that are
// more than kRounds rounds apart and wait in different orders may deadlock.
//
// If a peer dies, its contribution is either missing or still readable. Must be used by one thread.
class SharedRounds {
 public:
  using Outcome = PeerMemory::Outcome;
  using Deadline = PeerMemory::Deadline;
  // Indexed by rank; null for this rank.
  using Contributions = std::vector<const std::byte*>;
  struct Round;

  // `memory` must reach all ranks, and outlive this object.
  explicit SharedRounds(PeerMemory& memory);
  const SharedRoundsPlan& plan() const { return plan_; }

  // has_room() returns whether another round can begin now, and make_room() blocks until it can. After any outcome but
  // kDone, `peer` is the rank that caused the outcome, or -1, and the group is unusable.
  bool has_room();
  Outcome make_room(Deadline until, int& peer);

  // This rank's contribution: `bytes` bytes at `data`. No other rank reads the `unread_bytes` bytes at `unread_begin`.
  struct Contribution {
    const void* data = nullptr;
    uint64_t bytes = 0;
    uint64_t unread_begin = 0, unread_bytes = 0;
  };
  // Begins a round, for which there must be room. Copies the data before it returns. All ranks must pass the same tag.
  // `expected` is the number of bytes that each rank contributes, by rank. `read` is called in wait() or make_room()
  // when all contributions exist. If `read` is null, this rank needs no contributions, and leaves the round at once.
  std::shared_ptr<Round> begin(uint64_t tag, const Contribution& own, std::vector<uint64_t> expected,
                               std::function<void(const Contributions&)> read);

  // Blocks until this rank has read the contributions. Returns kOtherBytes if a size is not as expected. If another
  // rank passed another tag, the ranks run different operations: blocks until an interrupt or the deadline.
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
  std::vector<std::shared_ptr<Round>> rounds_;  // rounds in flight, indexed by number modulo kRounds
  uint64_t begun_ = 0, left_ = 0;               // this rank has begun, and left, all rounds before these numbers
  uint64_t left_by_others_ = 0;                 // the others have left all rounds before this number, as last read
  RoundSlots slots_;
  Contributions contributions_;
};

}  // namespace tessera::internal
