#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/comm/shared_memory/peer_memory.h"
#include "core/comm/shared_memory/shared_rounds_plan.h"

namespace tessera::internal {

// Small operations among ranks that all share memory, each of them one round: a rank puts what it contributes into a
// slot of the memory and counts itself in, and when it is waited for reads what the others have put there. One copy in
// and one out, and one wait for all ranks, where messages are announced, matched and waited for one by one: what a rank
// pays for an operation does not grow with the messages. (As Open MPI's and MPICH's collectives in shared memory do.)
//
// Rounds are numbered as a rank begins them, and all ranks begin them in one order. A rank has left a round when it has
// read it, or will not: nothing of the others' is needed, or its handle was dropped. [Note: nobody waits in a circle]
// Beginning a round R waits for nothing but room, that is for round R - kRounds to be left by all ranks: first the rank
// itself leaves it, if it has not yet, reading what the others have put there, into the results of the operation, which
// nobody may touch before that is waited for; then it waits for the others to leave. Let ranks wait; among them one
// that has begun the fewest rounds, R. What it may wait for is there, or comes from a rank that does not wait:
// - A round before R, to read it: every rank that waits has begun it, so its contribution is there.
// - Round R - kRounds to be left: a rank that has begun R has left it before that, one that has not is about to begin
//   it, and leaves first, since all have begun what it leaves; or it waits for something before R, which is there.
// Over several groups the same holds, "begun" being counted in the order in which all ranks begin the operations of all
// groups. Beside them are messages, whose first step needs no more of a peer than to have begun. An operation of two
// steps needs its peers to have come to its wait: where ranks wait for their operations in one order, one that waits is
// ahead of nobody, and those ahead of it have done their part; for ranks that are more than kRounds rounds apart, and
// wait in different orders, that has never been promised.
//
// A peer that dies has contributed or not, and its contribution stays readable. Used by one thread.
class SharedRounds {
 public:
  using Outcome = PeerMemory::Outcome;
  using Deadline = PeerMemory::Deadline;
  // By rank; null for this one.
  using Contributions = std::vector<const std::byte*>;
  struct Round;

  // The memory reaches all ranks, and outlives this.
  explicit SharedRounds(PeerMemory& memory);
  const SharedRoundsPlan& plan() const { return plan_; }

  // Makes room for one more round; returns at once if there is. After anything but kDone, `peer` is who is to blame, or
  // -1: the group is then of no use.
  bool has_room();
  Outcome make_room(Deadline until, int& peer);

  // What this rank contributes: `bytes` at `data`, but for a part that no other rank reads.
  struct Contribution {
    const void* data = nullptr;
    uint64_t bytes = 0;
    uint64_t unread_begin = 0, unread_bytes = 0;
  };
  // Begins a round, for which there is room; the data has been copied when this returns. All ranks come with one tag,
  // and `expected` says how many bytes each contributes. `read` is called once all have come, in wait() or
  // make_room(); null: nothing of the others' is needed, and the round is over.
  std::shared_ptr<Round> begin(uint64_t tag, const Contribution& own, std::vector<uint64_t> expected,
                               std::function<void(const Contributions&)> read);

  // Returns when the round has been read. Where ranks have come with other tags they have diverged, and it waits, for
  // who can say how.
  Outcome wait(Round& round, Deadline until, int& peer);
  // It will not be read.
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
  std::vector<std::shared_ptr<Round>> rounds_;  // under way, by their numbers modulo kRounds
  uint64_t begun_ = 0, left_ = 0;               // rounds before these
  uint64_t left_by_others_ = 0;                 // when it was last looked at
  RoundSlots slots_;
  Contributions contributions_;
};

}  // namespace tessera::internal
