#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/watchdog/wait_graph.h"

namespace tessera::internal {

// What one rank waits for in the groups that it is in, as the other ranks see it: in the store of the group of all.
// Thread-safe.
class RankWaits {
 public:
  // Where a group stands among those of this rank.
  struct Place {
    std::shared_ptr<RankWaits> waits;  // null for the group of all, whose watch makes it
    std::string name;
    std::vector<int> ranks;  // as the group of all numbers them; none: that one itself
  };

  struct Wait {
    uint64_t sequence = 0;
    std::string operation;
    uint64_t thread = 0;  // see thread_number()
  };
  struct Progress {
    uint64_t started_count = 0;  // of operations
    uint64_t thread = 0;         // which has joined the group and started all of them; 0: there were several
  };
  // A group of this rank's. Called by any thread.
  class Group {
   public:
    virtual ~Group() = default;
    virtual const Place& place() const = 0;
    virtual std::optional<Wait> long_wait() = 0;
    virtual Progress progress() = 0;
  };

  RankWaits(c10::intrusive_ptr<c10d::Store> store_of_all, int rank, int size)
      : store_(std::move(store_of_all)), rank_(rank), size_(size) {}

  void add(std::weak_ptr<Group> group);
  // A group of `members` of the one at `place`. To be called on ranks that are in none as well.
  Place split(const Place& place, const std::string& name, const std::vector<int>& members);

  // What ended the first of this rank's groups to fail: a reason for the others, if that is where they end. "": none
  // has.
  void note_failure(const std::string& text);
  std::string failure() const;

  // The following ask the store, which may take long, or throw. Before any split() they do nothing.
  void show();
  std::string find_cycle();  // cycle_text() of one that this rank waits for; all that are in it will be told
  // The same, if another rank has found out that what this one waits for in a group never comes.
  std::string told_of(const std::string& group, uint64_t sequence) const;
  std::string wait_of(int other) const;  // wait_text() of that rank of all; "" if it shows none
  int size() const noexcept { return size_; }

 private:
  bool is_split() const;
  std::vector<GroupWait> waits() const;
  std::vector<GroupWait> shown_by(int other) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;

  mutable std::mutex mutex_;  // guards the next three
  std::vector<std::weak_ptr<Group>> groups_;
  bool is_split_ = false;
  std::string failure_;

  std::mutex showing_;  // guards the next, and its order in the store
  std::string shown_;
};

// 1 and more, and never another thread's, as a std::thread::id may be.
uint64_t thread_number();

}  // namespace tessera::internal
