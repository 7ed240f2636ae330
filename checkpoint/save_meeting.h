#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/checkpoint/outcome.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/notes.h"

namespace tessera {

// The ranks by groups of about sqrt(size), so that nobody reads more than sqrt(size) small files of others.
class RankGroups {
 public:
  RankGroups(int rank, int size);
  int ranks() const { return ranks_; }  // of a group
  int count() const { return (size_ + ranks_ - 1) / ranks_; }
  // This rank's: from `leader` to before `end`.
  int leader() const { return rank_ / ranks_ * ranks_; }
  int end() const;

 private:
  int rank_, size_, ranks_;
};

// How ranks that write in the background tell each other how far they are: by notes in the group's store, since the
// communicator belongs to the loop's thread. On one thread, but for cancel().
class SaveMeeting {
 public:
  // `what` begins messages.
  SaveMeeting(std::shared_ptr<Communicator> comm, const std::string& name, std::string what);

  // Does this rank's part, which shows `life`, while the others are told that it gets on: until it has shown none for
  // SignOfLife::kPatience times the group's timeout.
  Outcome work(SignOfLife& life, const std::function<void()>& part);

  // What has become of the save: each rank tells how its part went, leaders of groups then merge theirs, rank 0
  // commits, and each gets to know how all went. Nobody is waited for that shows no life for the group's timeout, in
  // work() or here; merging and committing are work().
  Outcome meet(const Outcome& own, SignOfLife& life, const std::function<void()>& merge_group,
               const std::function<void()>& commit);

  // Ends waiting for others soon.
  void cancel() { cancelled_ = true; }

 private:
  void leave_outcome(const Outcome& outcome);
  // Waits until something holds; gives up when no rank has shown life for `patience` times the group's timeout.
  void await(const std::function<bool()>& ready, const std::string& what_for, double patience = 1);

  const std::shared_ptr<Communicator> comm_;
  const std::string what_;
  const RankGroups groups_;
  Notes notes_;
  std::atomic<bool> cancelled_ = false;
};

}  // namespace tessera
