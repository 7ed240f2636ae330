#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::internal {

// Where things lie in the memory of a SharedRounds, and what is small enough to be
// exchanged there. Integers alone, the same on all ranks: counts of elements decide, which are part of what an
// operation says it is, so that ranks which would decide differently have diverged anyway.
class SharedRoundsPlan {
 public:
  // So many rounds may be under way; also a rank's slots.
  static constexpr uint64_t kRounds = 32;
  static constexpr size_t kLineBytes = 64, kPageBytes = 4096;
  static constexpr int64_t kMostElementBytes = 16;

  // In offsets of the memory, which begins on a page: whatever several ranks write has lines of the cache for itself,
  // but for entries, which are read all together.
  struct Entry {
    uint64_t tag, bytes;
    uint64_t slot;  // of the rank that wrote it
    uint64_t unused;
  };

  explicit SharedRoundsPlan(int ranks);

  // Elements of the full tensor, at most, of an all-gather or a reduce-scatter: what a rank gives or gets.
  int64_t most_numel() const { return most_numel_; }
  // Of an all-reduce, or a reduce: each rank reads as much of every other one.
  int64_t most_reduced_numel() const { return most_reduced_numel_; }

  size_t arrivals(uint64_t round) const { return kLineBytes * (round % kRounds); }
  size_t participant(int rank) const { return kLineBytes * (kRounds + static_cast<size_t>(rank)); }
  size_t entry(uint64_t round, int rank) const;
  size_t slot(int rank, uint64_t slot) const;
  size_t slot_bytes() const { return static_cast<size_t>(most_numel_ * kMostElementBytes); }
  size_t bytes() const { return slot(ranks_, 0); }

 private:
  const int ranks_;
  const int64_t most_numel_, most_reduced_numel_;
};

// Which of a rank's slots a round uses: the lowest that nobody may read any more, so that of the memory little is ever
// touched where few rounds are under way.
class RoundSlots {
 public:
  // A free one for this round, the last to begin. Slots are free whose rounds all other ranks have left, that is those
  // before `left`; if there is none among those that were ever used, `ask` says anew what they have left.
  uint64_t take(uint64_t round, const std::function<uint64_t()>& ask);
  uint64_t ever_used() const { return rounds_.size(); }

 private:
  std::vector<uint64_t> rounds_;  // the last of each slot
  uint64_t left_ = 0;
};

}  // namespace tessera::internal
