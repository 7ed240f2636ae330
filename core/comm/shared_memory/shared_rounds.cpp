#include "core/comm/shared_memory/shared_rounds.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

namespace tessera::internal {

struct SharedRounds::Participant {
  std::atomic<uint64_t> begun, left;  // the rank has begun, and left, all rounds before these numbers
};

struct SharedRounds::Round {
  uint64_t number, tag;
  std::vector<uint64_t> expected;  // bytes that each rank contributes, by rank
  std::function<void(const Contributions&)> read;
  bool is_over = false;
};

SharedRounds::SharedRounds(PeerMemory& memory)
    : memory_(memory),
      board_(memory.board()),
      base_(board_->rounds_area()),
      rank_(memory.rank()),
      ranks_(board_->ranks()),
      plan_(ranks_),
      rounds_(SharedRoundsPlan::kRounds),
      contributions_(static_cast<size_t>(ranks_)) {}

// ---- rounds -------------------------------------------------------------------------------------

uint64_t SharedRounds::left_by_others() const {
  uint64_t left = UINT64_MAX;
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) left = std::min(left, at<Participant>(plan_.participant(rank)).left.load());
  return left;
}

bool SharedRounds::has_room() {
  if (left_ + SharedRoundsPlan::kRounds <= begun_) return false;
  if (left_by_others_ + SharedRoundsPlan::kRounds <= begun_) left_by_others_ = left_by_others();
  return left_by_others_ + SharedRoundsPlan::kRounds > begun_;
}

SharedRounds::Outcome SharedRounds::make_room(Deadline until, int& peer) {
  while (left_ + SharedRoundsPlan::kRounds <= begun_) {
    const auto oldest = rounds_[left_ % SharedRoundsPlan::kRounds];
    if (const Outcome outcome = wait(*oldest, until, peer); outcome != Outcome::kDone) return outcome;
  }
  const auto is_behind = [this](int rank) {
    return at<Participant>(plan_.participant(rank)).left.load() + SharedRoundsPlan::kRounds <= begun_;
  };
  const SharedBoard::WaitForRoom waits(*board_);
  return watch(until, peer, [this] { return has_room(); }, is_behind);
}

std::shared_ptr<SharedRounds::Round> SharedRounds::begin(uint64_t tag, const Contribution& own,
                                                         std::vector<uint64_t> expected,
                                                         std::function<void(const Contributions&)> read) {
  auto round = std::make_shared<Round>(Round{begun_, tag, std::move(expected), std::move(read)});
  const uint64_t slot = slots_.take(begun_, [this] { return left_by_others_ = left_by_others(); });
  std::byte* const place = base_ + plan_.slot(rank_, slot);
  const auto* const data = static_cast<const std::byte*>(own.data);
  const uint64_t behind = own.unread_begin + own.unread_bytes;
  if (own.unread_begin > 0) std::memcpy(place, data, own.unread_begin);
  if (behind < own.bytes) std::memcpy(place + behind, data + behind, own.bytes - behind);
  at<SharedRoundsPlan::Entry>(plan_.entry(begun_, rank_)) = {tag, own.bytes, slot, 0};
  rounds_[begun_ % SharedRoundsPlan::kRounds] = round;
  // Increments the arrivals before `begun`. In the other order, a rank that dies in between would not be noticed.
  const auto arrivals = at<std::atomic<uint64_t>>(plan_.arrivals(begun_)).fetch_add(1) + 1;
  at<Participant>(plan_.participant(rank_)).begun.store(++begun_);
  if (arrivals % static_cast<uint64_t>(ranks_) == 0) board_->ring();
  if (!round->read) leave(*round);
  return round;
}

bool SharedRounds::has_come(const Round& round, int rank) const {
  return at<Participant>(plan_.participant(rank)).begun.load() > round.number &&
         at<SharedRoundsPlan::Entry>(plan_.entry(round.number, rank)).tag == round.tag;
}

bool SharedRounds::all_have_come(const Round& round) const {
  const auto& arrivals = at<std::atomic<uint64_t>>(plan_.arrivals(round.number));
  if (arrivals.load() < static_cast<uint64_t>(ranks_) * (round.number / SharedRoundsPlan::kRounds + 1)) return false;
  for (int rank = 0; rank < ranks_; ++rank)
    if (at<SharedRoundsPlan::Entry>(plan_.entry(round.number, rank)).tag != round.tag) return false;
  return true;
}

SharedRounds::Outcome SharedRounds::wait(Round& round, Deadline until, int& peer) {
  if (round.is_over) return Outcome::kDone;
  const Outcome outcome =
      watch(until, peer, [&] { return all_have_come(round); }, [&](int rank) { return !has_come(round, rank); });
  if (outcome != Outcome::kDone) return outcome;
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto& entry = at<SharedRoundsPlan::Entry>(plan_.entry(round.number, rank));
    const bool is_own = rank == rank_;
    if (!is_own &&
        (entry.bytes != round.expected[static_cast<size_t>(rank)] || entry.slot >= SharedRoundsPlan::kRounds)) {
      peer = rank;
      return Outcome::kOtherBytes;
    }
    contributions_[static_cast<size_t>(rank)] = is_own ? nullptr : base_ + plan_.slot(rank, entry.slot);
  }
  round.read(contributions_);
  leave(round);
  return Outcome::kDone;
}

void SharedRounds::drop(Round& round) {
  if (!round.is_over) leave(round);
}

void SharedRounds::leave(Round& round) {
  round.is_over = true;
  round.read = nullptr;
  const uint64_t before = left_;
  while (left_ < begun_ && rounds_[left_ % SharedRoundsPlan::kRounds]->is_over)
    rounds_[left_++ % SharedRoundsPlan::kRounds].reset();
  if (left_ == before) return;
  at<Participant>(plan_.participant(rank_)).left.store(left_);
  board_->ring_for_room();
}

// ---- waiting ------------------------------------------------------------------------------------

// Blocks until is_over(), an interrupt or the deadline, or until a rank for which is_awaited() is true ends or leaves.
template <class IsOver, class IsAwaited>
SharedRounds::Outcome SharedRounds::watch(Deadline until, int& peer, IsOver is_over, IsAwaited is_awaited) const {
  peer = -1;
  if (is_over()) return Outcome::kDone;
  const auto began = RunClock::now();
  const auto poll_time = memory_.poll_time();
  while (RunClock::now() - began < poll_time && !memory_.is_interrupted()) {
    if (is_over()) return Outcome::kDone;
    std::this_thread::yield();  // the awaited rank may need this core
  }
  const auto find = [&](auto holds) {
    for (peer = 0; peer < ranks_; ++peer)
      if (is_awaited(peer) && holds(peer)) return true;
    peer = -1;
    return false;
  };
  const SharedBoard::Listener listener(*board_);
  auto asked = began;
  for (bool is_first = true;; is_first = false) {
    // Reads has_left before is_over(). A rank contributes before it sets has_left, so no contribution is missed.
    const uint32_t rings = listener.rings();
    const bool has_left = !is_first && find([this](int rank) { return memory_.has_left(rank); });
    if (is_over()) return Outcome::kDone;
    if (memory_.is_interrupted()) return Outcome::kInterrupted;
    if (has_left) return Outcome::kPeerLeft;
    const auto now = RunClock::now();
    if (now >= until) {
      find([](int) { return true; });
      return Outcome::kTimedOut;
    }
    if (now - asked >= PeerMemory::kAskEvery) {
      asked = now;
      if (find([this](int rank) { return !memory_.is_alive(rank); })) return Outcome::kPeerDied;
    }
    listener.sleep(rings, std::min<std::chrono::nanoseconds>(PeerMemory::kAskEvery, until - now));
  }
}

}  // namespace tessera::internal
