#include "core/comm/shared_memory/shared_rounds_plan.h"

#include <algorithm>

namespace tessera::internal {
namespace {

// Above this size, one direct copy between two ranks' memories is faster than a copy into a slot and one out of it.
constexpr int64_t kMostNumel = 1 << 16;
// The limit of the sum of most_numel() over all ranks, which bounds the shared memory.
constexpr int64_t kMostNumelOfAll = 1 << 21;
// Above this size, with over two ranks, an all-reduce in two steps copies fewer bytes than an all-reduce in one round.
constexpr int64_t kMostReducedBytes = 1 << 16;

}  // namespace

SharedRoundsPlan::SharedRoundsPlan(int ranks)
    : ranks_(ranks), most_numel_(std::min(kMostNumel, kMostNumelOfAll / ranks)) {}

bool SharedRoundsPlan::reduces(int64_t numel, int64_t bytes) const {
  return numel <= most_numel_ && (ranks_ == 2 || bytes <= kMostReducedBytes);
}

size_t SharedRoundsPlan::entry(uint64_t round, int rank) const {
  return participant(ranks_) +
         (round % kRounds * static_cast<uint64_t>(ranks_) + static_cast<uint64_t>(rank)) * sizeof(Entry);
}

size_t SharedRoundsPlan::slot(int rank, uint64_t slot) const {
  const size_t first = (entry(kRounds - 1, ranks_) + kPageBytes - 1) / kPageBytes * kPageBytes;
  return first + (static_cast<size_t>(rank) * kRounds + slot) * slot_bytes();
}

uint64_t RoundSlots::take(uint64_t round, const std::function<uint64_t()>& ask) {
  const auto find = [this] { return std::ranges::find_if(rounds_, [this](uint64_t last) { return last < left_; }); };
  auto found = find();
  if (found == rounds_.end() && !rounds_.empty()) {
    left_ = ask();
    found = find();
  }
  if (found == rounds_.end()) found = rounds_.insert(found, round);
  *found = round;
  return static_cast<uint64_t>(found - rounds_.begin());
}

}  // namespace tessera::internal
