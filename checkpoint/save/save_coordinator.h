#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "checkpoint/save/outcome.h"
#include "core/comm/store_mailbox.h"

namespace tessera::internal {

// Splits the ranks into subgroups of about sqrt(size) ranks. So each rank reads at most about sqrt(size) part files.
class Subgroups {
 public:
  Subgroups(int rank, int size);
  int ranks() const { return ranks_; }  // number of ranks in a subgroup
  int count() const { return (size_ + ranks_ - 1) / ranks_; }
  // This rank's subgroup consists of the ranks in [leader(), end()).
  int leader() const { return rank_ / ranks_ * ranks_; }
  int end() const;

 private:
  int rank_, size_, ranks_;
};

// Coordinates the ranks of a background save through messages in the group's store. Does not use the communicator's
// collectives, which belong to the training loop's thread. Must be used by one thread, except for hurry().
class SaveCoordinator {
 public:
  // `name` must be unique to the save, because its messages have this prefix. Error texts start with `what`.
  SaveCoordinator(std::shared_ptr<Communicator> comm, const std::string& name, std::string what);

  // Runs this rank's part, which must call heartbeat.beat(). During the run, reports to the other ranks that this rank
  // makes progress. The reports stop if the last beat is older than Heartbeat::kMostTimeouts times the group's timeout.
  Outcome work(Heartbeat& heartbeat, const std::function<void()>& part);

  // Ends the save. Each rank publishes its outcome. If no rank failed, subgroup leaders call merge_subgroup, and then
  // rank 0 calls `commit`, both through work(). All ranks return the result. The save fails if no rank reports progress
  // for the group's timeout. If rank 0 does not answer, throws CheckpointError; if the store is lost, CommError.
  Outcome finish(const Outcome& own, Heartbeat& heartbeat, const std::function<void()>& merge_subgroup,
                 const std::function<void()>& commit);

  // Shortens the current and all later waits for other ranks. A wait then ends after a few missing heartbeats, instead
  // of the group's timeout. If `all_ranks_leave` is set, a wait ends after one missing heartbeat.
  void hurry(bool all_ranks_leave = false);

 private:
  void leave_outcome(const Outcome& outcome);
  void lead_subgroup(Heartbeat& heartbeat, const std::function<void()>& merge);
  Outcome commit_all(Heartbeat& heartbeat, const std::function<void()>& commit);
  void remove_notes();
  // Return the longest pause between two checks of a waiting rank, and the heartbeat interval of a working rank.
  std::chrono::milliseconds longest_pause() const;
  std::chrono::milliseconds beat_every() const;
  // Blocks until ready() returns true. If no rank reports progress for `patience` times the group's timeout, throws
  // CheckpointError. Throws sooner if the process of a rank has ended, or if hurry() was called.
  void await(const std::function<bool()>& ready, const std::string& what_for, double patience = 1);

  const std::shared_ptr<Communicator> comm_;
  const std::string what_;
  const Subgroups subgroups_;
  StoreMailbox notes_;
  std::atomic<bool> hurries_ = false, is_left_ = false;
};

}  // namespace tessera::internal
