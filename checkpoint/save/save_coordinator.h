#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "checkpoint/save/outcome.h"
#include "core/comm/store_mailbox.h"

namespace tessera::internal {

// Splits the ranks into subgroups of about sqrt(size) ranks, so that no rank reads more than about sqrt(size) files.
class Subgroups {
 public:
  Subgroups(int rank, int size);
  int ranks() const { return ranks_; }  // number of ranks in a subgroup
  int count() const { return (size_ + ranks_ - 1) / ranks_; }
  // This rank's subgroup is [leader, end).
  int leader() const { return rank_ / ranks_ * ranks_; }
  int end() const;

 private:
  int rank_, size_, ranks_;
};

// Coordinates the ranks of a background save by messages in the group's store, because the communicator belongs to the
// training loop's thread. Must be used by one thread, except for hurry().
class SaveCoordinator {
 public:
  // Error messages start with `what`.
  SaveCoordinator(std::shared_ptr<Communicator> comm, const std::string& name, std::string what);

  // Runs this rank's part, which must call heartbeat.beat(). Meanwhile reports to the other ranks that this rank makes
  // progress, unless the last beat is older than Heartbeat::kMostTimeouts times the group's timeout.
  Outcome work(Heartbeat& heartbeat, const std::function<void()>& part);

  // Ends the save: each rank publishes its outcome, leaders merge the files of their subgroups, rank 0 commits, and all
  // ranks receive the result. Does not wait for a rank that was silent for the group's timeout. Merging and committing
  // run through work().
  Outcome finish(const Outcome& own, Heartbeat& heartbeat, const std::function<void()>& merge_subgroup,
                 const std::function<void()>& commit);

  // Shortens waits from now on. A wait for another rank then ends after a few missing heartbeats, not after the group's
  // timeout. If `all_ranks_leave`, one missing heartbeat is enough.
  void hurry(bool all_ranks_leave = false);

 private:
  void leave_outcome(const Outcome& outcome);
  void lead_subgroup(Heartbeat& heartbeat, const std::function<void()>& merge);
  Outcome commit_all(Heartbeat& heartbeat, const std::function<void()>& commit);
  void remove_notes();
  // The longest pause between two checks by a waiting rank, and the interval of a working rank's heartbeats.
  std::chrono::milliseconds longest_pause() const;
  std::chrono::milliseconds beat_every() const;
  // Blocks until ready() returns true. Throws CheckpointError if no rank reports progress for `patience` times the
  // group's timeout. Throws sooner if the process of a rank has ended, or after hurry().
  void await(const std::function<bool()>& ready, const std::string& what_for, double patience = 1);

  const std::shared_ptr<Communicator> comm_;
  const std::string what_;
  const Subgroups subgroups_;
  StoreMailbox notes_;
  std::atomic<bool> hurries_ = false, is_left_ = false;
};

}  // namespace tessera::internal
