#include "checkpoint/save/save_coordinator.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "core/runtime/run_clock.h"

namespace tessera::internal {
namespace {

constexpr int kSmallWorld = 4;     // up to this world size, all ranks are in one subgroup
constexpr int kMostMissed = 5;     // silent beats until await() looks for ended ranks; after hurry(), until it gives up
constexpr double kLateBeat = 1.2;  // after hurry(), silent beats until it looks; if all ranks leave, until it gives up

}  // namespace

Subgroups::Subgroups(int rank, int size)
    : rank_(rank),
      size_(size),
      ranks_(size <= kSmallWorld ? size : static_cast<int>(std::ceil(std::sqrt(static_cast<double>(size))))) {}

int Subgroups::end() const { return std::min(leader() + ranks_, size_); }

SaveCoordinator::SaveCoordinator(std::shared_ptr<Communicator> comm, const std::string& name, std::string what)
    : comm_(std::move(comm)), what_(std::move(what)), subgroups_(comm_->rank(), comm_->size()), notes_(*comm_, name) {}

// The pause grows with the number of ranks, because all ranks poll the same store.
std::chrono::milliseconds SaveCoordinator::longest_pause() const {
  return std::chrono::milliseconds(std::max(50, comm_->size() / 50));
}

std::chrono::milliseconds SaveCoordinator::beat_every() const {
  return std::min(comm_->timeout() / 8, 20 * longest_pause());
}

void SaveCoordinator::hurry(bool all_ranks_leave) {
  if (all_ranks_leave) is_left_ = true;
  hurries_ = true;
  notes_.limit_patience(kMostMissed * beat_every());
}

Outcome SaveCoordinator::work(Heartbeat& heartbeat, const std::function<void()>& part) {
  std::mutex mutex;
  std::condition_variable ended_changed;
  bool ended = false;
  heartbeat.beat();
  std::jthread others([&] {
    std::unique_lock lock(mutex);
    while (!ended_changed.wait_for(lock, beat_every(), [&] { return ended; })) {
      if (heartbeat.is_older_than(Heartbeat::kMostTimeouts * comm_->timeout())) continue;
      try {
        notes_.add("alive", 1);
      } catch (const CommError&) {  // the store is lost, so this rank fails when its part has ended
        return;
      }
    }
  });
  const std::shared_ptr<void> at_end(nullptr, [&](void*) {
    const std::lock_guard lock(mutex);
    ended = true;
    ended_changed.notify_one();
  });
  return attempt([&] { return part(), std::string(); });
}

void SaveCoordinator::await(const std::function<bool()>& ready, const std::string& what_for, double patience) {
  auto last_change = RunClock::now();
  int64_t last_sum = -1;
  auto pause = std::chrono::milliseconds(1);
  while (!ready()) {
    const int64_t sum = notes_.add("alive", 0);
    if (sum != std::exchange(last_sum, sum)) last_change = RunClock::now();
    const auto silence = RunClock::now() - last_change;
    const bool gives_up = hurries_ && silence > (is_left_ ? kLateBeat : kMostMissed) * beat_every();
    const int ended =
        silence > (hurries_ ? kLateBeat : patience * kMostMissed) * beat_every() ? notes_.ended_rank() : -1;
    if (ended >= 0) throw CheckpointError(what_for + ": the process of rank " + std::to_string(ended) + " has ended");
    if (gives_up || silence > patience * comm_->timeout())
      throw CheckpointError(what_for + (gives_up ? " before the save was given up" : " in time"));
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, longest_pause());
  }
}

void SaveCoordinator::leave_outcome(const Outcome& outcome) {
  if (outcome.error.empty()) return;
  notes_.leave("outcome/" + std::to_string(comm_->rank()), outcome.to_text());
  notes_.add("failed", 1);
}

void SaveCoordinator::lead_subgroup(Heartbeat& heartbeat, const std::function<void()>& merge) {
  const std::string written = "written/" + std::to_string(subgroups_.leader());
  try {
    await([&] { return notes_.add(written, 0) == subgroups_.end() - subgroups_.leader(); }, "");
    if (notes_.add("failed", 0) == 0) leave_outcome(work(heartbeat, merge));
  } catch (const CheckpointError& error) {
    int rank = subgroups_.leader();
    while (rank < subgroups_.end() && notes_.find("ended/" + std::to_string(rank))) ++rank;
    const std::string who = rank < subgroups_.end() ? "rank " + std::to_string(rank) + " did not finish writing"
                                                    : std::string("a rank did not finish");
    leave_outcome({.error = what_ + ": " + who + error.what()});
  }
  notes_.remove(written);
  notes_.add("groups", 1);
}

Outcome SaveCoordinator::commit_all(Heartbeat& heartbeat, const std::function<void()>& commit) {
  return attempt([&] {
    await([&] { return notes_.add("groups", 0) == subgroups_.count(); }, what_ + ": a group of ranks did not finish",
          1.2);  // waits longer than a subgroup's leader, so that the leader can report a lost rank
    std::vector<Outcome> outcomes(comm_->size());
    if (notes_.add("failed", 0) > 0)
      for (int rank = 0; rank < comm_->size(); ++rank)
        if (const auto text = notes_.find("outcome/" + std::to_string(rank)))
          outcomes[rank] = Outcome::from_text(*text);
    throw_failures(outcomes, what_);
    throw_failures({work(heartbeat, commit)}, what_);
    return std::string();
  });
}

// Removes the save's messages. Rank 0 usually hosts the store, so it waits until all ranks have read the result.
void SaveCoordinator::remove_notes() {
  notes_.remove("ended/" + std::to_string(comm_->rank()));
  notes_.remove("outcome/" + std::to_string(comm_->rank()));
  notes_.add("read", 1);
  if (comm_->rank() != 0) return;
  try {
    await([&] { return notes_.add("read", 0) == comm_->size(); }, "");
  } catch (const CheckpointError&) {
    return;
  }
  for (const char* name : {"result", "failed", "groups", "alive", "read"}) notes_.remove(name);
}

Outcome SaveCoordinator::finish(const Outcome& own, Heartbeat& heartbeat, const std::function<void()>& merge_subgroup,
                                const std::function<void()>& commit) {
  leave_outcome(own);
  notes_.leave("ended/" + std::to_string(comm_->rank()), "");
  notes_.add("written/" + std::to_string(subgroups_.leader()), 1);
  notes_.add("alive", 1);
  if (comm_->rank() == subgroups_.leader()) lead_subgroup(heartbeat, merge_subgroup);
  Outcome result;
  if (comm_->rank() == 0) {
    result = commit_all(heartbeat, commit);
    if (!result.error.empty()) hurry();  // a failed rank may have ended and may never read the result
    notes_.leave("result", result.to_text());
  } else {
    await([&] { return notes_.find("result").has_value(); }, what_ + ": rank 0 did not finish", 1.4);
    result = Outcome::from_text(*notes_.find("result"));
  }
  remove_notes();
  return result;
}

}  // namespace tessera::internal
