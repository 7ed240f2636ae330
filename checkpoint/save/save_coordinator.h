#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "checkpoint/save/outcome.h"
#include "core/comm/communicator.h"
#include "core/comm/store_mailbox.h"

namespace tessera {

// The ranks by subgroups of about sqrt(size), so that nobody reads more than sqrt(size) small files of others.
class Subgroups {
 public:
  Subgroups(int rank, int size);
  int ranks() const { return ranks_; }  // of a subgroup
  int count() const { return (size_ + ranks_ - 1) / ranks_; }
  // This rank's: from `leader` to before `end`.
  int leader() const { return rank_ / ranks_ * ranks_; }
  int end() const;

 private:
  int rank_, size_, ranks_;
};

// How ranks that write in the background tell each other how far they are: by notes in the group's store, since the
// communicator belongs to the loop's thread. On one thread, but for hurry().
class SaveCoordinator {
 public:
  // `what` begins messages.
  SaveCoordinator(std::shared_ptr<Communicator> comm, const std::string& name, std::string what);

  // Does this rank's part, which beats, while the others are told that it gets on: until it has not beaten for
  // Heartbeat::kMostTimeouts times the group's timeout.
  Outcome work(Heartbeat& heartbeat, const std::function<void()>& part);

  // Ends the save: each rank tells how its part went, leaders then merge what their subgroups wrote, rank 0 commits,
  // and each gets to know how all went. A rank of which nothing is heard for the group's timeout, in work() or here, is
  // not waited for; merging and committing are work().
  Outcome finish(const Outcome& own, Heartbeat& heartbeat, const std::function<void()>& merge_subgroup,
                 const std::function<void()>& commit);

  // From now on it waits for others only as long as they are heard of, not for the group's timeout.
  void hurry() { hurries_ = true; }

 private:
  void leave_outcome(const Outcome& outcome);
  void lead_subgroup(Heartbeat& heartbeat, const std::function<void()>& merge);
  Outcome commit_all(Heartbeat& heartbeat, const std::function<void()>& commit);
  void remove_notes();
  // How often a rank at work is heard of, and the others look whether it has ended.
  std::chrono::milliseconds longest_pause() const;
  std::chrono::milliseconds beat_every() const;
  // Waits until something holds; gives up when nothing was heard of any rank for `patience` times the group's timeout,
  // or for some seconds while one is known to be no more.
  void await(const std::function<bool()>& ready, const std::string& what_for, double patience = 1);

  const std::shared_ptr<Communicator> comm_;
  const std::string what_;
  const Subgroups subgroups_;
  StoreMailbox notes_;
  std::atomic<bool> hurries_ = false;
};

}  // namespace tessera
