#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/watchdog/wait_graph.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// The waits of one rank in all of its groups. The rank publishes the waits in the store of the group of all ranks.
// Thread-safe.
class WaitRegistry {
 public:
  // A group's identity among the groups of this rank.
  struct Place {
    std::shared_ptr<WaitRegistry> waits;  // null for the group of all ranks, whose watchdog makes the registry
    std::string name;
    std::vector<int> ranks;  // the members' ranks in the group of all ranks; empty for that group
  };

  struct Wait {
    uint64_t sequence = 0;
    std::string operation;
    uint64_t thread = 0;  // see thread_number()
  };
  struct Progress {
    uint64_t started_count = 0;  // number of operations that this rank has started
    uint64_t thread = 0;         // the thread that created the group and started all operations; 0 if there is none
  };
  // A group of this rank. Its functions must be thread-safe.
  class Group {
   public:
    virtual ~Group() = default;
    virtual const Place& place() const = 0;
    virtual std::optional<Wait> long_wait() = 0;
    virtual Progress progress() = 0;
  };

  WaitRegistry(c10::intrusive_ptr<c10d::Store> store_of_all, int rank, int size)
      : store_(std::move(store_of_all)), rank_(rank), size_(size) {}

  void add(std::weak_ptr<Group> group);
  // Returns the place of a group that consists of `members` and is split from the group at `place`. Must also be called
  // on ranks that are not members.
  Place split(const Place& place, const std::string& name, const std::vector<int>& members);

  // note_failure() keeps the first failure of any group of this rank. failure() returns it, or "" if there is none.
  void note_failure(const std::string& text);
  std::string failure() const;

  // Returns whether this rank has a long wait in any group; false before a split(). Does not call the store.
  bool has_long_wait() const { return is_split() && !waits().empty(); }

  // The next four functions call the store, so they may block or throw. Without a split() they are no-ops or return "".
  void show();               // publishes the long waits of this rank, if they have changed
  std::string find_cycle();  // publishes and returns the text of a cycle that blocks this rank; "" if none
  // Returns the published text of a cycle that includes the wait for operation `sequence` of `group`; "" if none.
  std::string told_of(const std::string& group, uint64_t sequence) const;
  std::string wait_of(int other) const;  // wait_text() of a wait of `other`, a rank of the group of all; "" if none
  int size() const noexcept { return size_; }

 private:
  bool is_split() const;
  std::vector<GroupWait> waits() const;
  std::vector<GroupWait> shown_by(int other) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> groups_ TESSERA_GUARDED_BY(mutex_);
  bool is_split_ TESSERA_GUARDED_BY(mutex_) = false;
  std::string failure_ TESSERA_GUARDED_BY(mutex_);

  std::mutex showing_;  // guards shown_, and orders this rank's writes to the store
  std::string shown_ TESSERA_GUARDED_BY(showing_);
};

// Returns a number of the calling thread, at least 1. Unlike std::thread::id, the number is never reused.
uint64_t thread_number();

}  // namespace tessera::internal
