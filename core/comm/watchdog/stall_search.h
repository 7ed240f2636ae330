#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/watchdog/group_news.h"
#include "core/comm/watchdog/started_operations.h"
#include "core/comm/watchdog/wait_registry.h"

namespace tessera::internal {

// Searches the store for the reason of a stalled operation. All functions call the store, so they may block, and throw
// if the store is lost. Must be used by one thread.
class StallSearch {
 public:
  // `news` and `place` must outlive this object.
  StallSearch(c10::intrusive_ptr<c10d::Store> store, int rank, GroupNews& news, const WaitRegistry::Place& place)
      : store_(std::move(store)), rank_(rank), news_(news), place_(place) {}

  struct Reason {
    std::string text;  // "" if no reason was found
    bool is_published = false;
  };
  // Returns a failure that another rank has published. Otherwise compares this rank's operations with those of the
  // first stalled rank, and returns the first difference. If this rank stalled first, publishes its operations instead.
  Reason find_failure_or_divergence(const std::deque<StartedOperation>& own);
  // Compares this rank's operations with those of the first stalled rank. Returns the first difference; "" if there is
  // none, or if no rank is stalled. For a rank that is not stalled in this group.
  std::string find_divergence(const std::deque<StartedOperation>& own);
  // Returns an error text if a rank has left before an operation that this rank has started, otherwise "". Reads the
  // store at most once a second, and returns "" in between.
  std::string find_leaver(const std::deque<StartedOperation>& own);
  // Returns the text of a cycle of waits (a deadlock) across groups that blocks this rank; "" if none, or if no `wait`.
  // Only the rank that has published its operations searches, and it publishes a found cycle for the other ranks.
  std::string find_cycle(const std::optional<WaitRegistry::Wait>& wait);

  // Returns whether the store has keys of this search, which end() removes.
  bool is_active() const { return is_active_; }
  void end();

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  GroupNews& news_;
  const WaitRegistry::Place& place_;
  bool is_active_ = false;
  std::string published_;  // this rank's operations as published; "" unless this rank was the first to stall
  std::chrono::steady_clock::time_point searched_leavers_, searched_cycles_;
};

// Compares `own`, the operations of this `rank`, with `published`, those of another rank. Returns an error text about
// the first operation number for which the descriptions differ; "" if there is none.
std::string divergence_text(int rank, const std::deque<StartedOperation>& own, const std::string& published);
// Returns the operations of `rank` as the text that it publishes.
std::string published_text(int rank, const std::deque<StartedOperation>& operations);

// Returns the ranks among `ranks` that are not stalled. Calls the store.
std::vector<int> ranks_not_stalled(c10d::Store& store, const std::vector<int>& ranks);

}  // namespace tessera::internal
