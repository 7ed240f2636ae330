#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::internal {

// The layout of the memory of SharedRounds, and the limits of small operations, in elements. Ranks compare the same
// number of elements with these limits, so they agree which operations are small, unless the ranks have diverged.
class SharedRoundsPlan {
 public:
  // The largest number of rounds in flight, and also the number of slots of a rank.
  static constexpr uint64_t kRounds = 32;
  static constexpr size_t kLineBytes = 64, kPageBytes = 4096;
  static constexpr int64_t kMostElementBytes = 16;

  // arrivals(), participant(), entry() and slot() return offsets into the memory, which begins at a page boundary. Each
  // counter has its own cache line. Entries share lines, because a rank reads all entries of a round together.
  struct Entry {
    uint64_t tag, bytes;
    uint64_t slot;  // number of the slot, among the slots of the rank that wrote the entry
    uint64_t unused;
  };

  explicit SharedRoundsPlan(int ranks);

  // Largest full tensor of an all-gather or reduce-scatter, in elements.
  int64_t most_numel() const { return most_numel_; }
  // Whether a full tensor is small enough for an all-reduce or reduce, in which each rank reads the full tensors of all
  // other ranks. With over two ranks, `bytes` must not exceed 64 KiB.
  bool reduces(int64_t numel, int64_t bytes) const;

  size_t arrivals(uint64_t round) const { return kLineBytes * (round % kRounds); }
  size_t participant(int rank) const { return kLineBytes * (kRounds + static_cast<size_t>(rank)); }
  size_t entry(uint64_t round, int rank) const;
  size_t slot(int rank, uint64_t slot) const;
  size_t slot_bytes() const { return static_cast<size_t>(most_numel_ * kMostElementBytes); }
  size_t bytes() const { return slot(ranks_, 0); }

 private:
  const int ranks_;
  const int64_t most_numel_;
};

// Assigns this rank's slots to rounds. Uses the lowest free slot, so that few rounds in flight touch little memory.
class RoundSlots {
 public:
  // Returns a free slot for `round`, the newest round. A slot is free when all other ranks have left its round. If no
  // used slot is known to be free, calls `ask`, which must return the first round that another rank has not left.
  uint64_t take(uint64_t round, const std::function<uint64_t()>& ask);
  uint64_t ever_used() const { return rounds_.size(); }

 private:
  std::vector<uint64_t> rounds_;  // the last round of each slot, indexed by slot
  uint64_t left_ = 0;
};

}  // namespace tessera::internal
