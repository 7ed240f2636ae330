#pragma once

#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "fsdp/sharded_model.h"
#include "fsdp/unit.h"

namespace tessera::internal {

// Predicts the next units from the order of the last pass (a forward or a backward). A value: no ranks, no tensors.
class PrefetchOrder {
 public:
  // Starts a pass. The units of the one before, if any, become expected().
  void begin_pass();

  // The prediction for the first pass; each later pass is expected to repeat the one before.
  void expect(std::vector<int> order) { expected_ = std::move(order); }

  // Records a use. The same unit twice in a row counts once. A pass that does not end (evaluations that call modules
  // and not the wrapper) starts over after kLongestPass uses.
  static constexpr size_t kLongestPass = size_t{1} << 16;
  void used(int unit);

  // Removes the last uses if they repeat the two equal sequences before them. Between passes, modules that are called
  // directly would otherwise lengthen seen() without end.
  void forget_repetition();

  // The next `count` different units at this point of the last pass, nearest first. Empty if the last use is not in
  // expected().
  std::vector<int> upcoming(int count) const;

  // The uses of this pass, in order.
  const std::vector<int>& seen() const { return current_; }
  const std::vector<int>& expected() const { return expected_; }

 private:
  std::vector<int> expected_;
  std::vector<int> current_;
  size_t next_ = 0;      // the index in expected_ of the next use
  bool on_path_ = true;  // the last use is in expected_
};

// Decides which units are unsharded: prefetches FsdpOptions::prefetch units ahead, keeps FsdpOptions::keep_recent, and
// evicts the least recently used. Only UnshardedUnits unshards and reshards units, except for summoned ones. Used by
// one thread at a time.
class UnshardedUnits {
 public:
  explicit UnshardedUnits(ShardedModel& model) : model_(model) {}

  // Reshards units that an earlier pass prefetched and did not use.
  void pre_forward();
  void pre_backward();
  // Before an operator uses the units: evicts others, unshards these, and prefetches the units that followed in the
  // last pass. Collective.
  void use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward);
  void reshard(Unit& unit);
  void reshard_all();
  // After a backward: the next use outside a backward begins a forward. `accumulates`: with unchanged shards.
  void post_backward(bool accumulates);

  // For the trace: the span of the units of the last use() ends now.
  void end_compute_span();
  // A line for each pass: the order of units in the last one that used any.
  void describe(std::ostream& text) const;

 private:
  size_t most_seen() const;
  void drop_secondaries();
  void evict_for(const std::vector<Unit*>& needed, bool is_first_of_backward);
  void prefetch(const PrefetchOrder& order);
  void set_current(std::vector<Unit*> units, Page::GradMode mode);
  void describe(std::ostream& text, const char* pass, const PrefetchOrder& order) const;

  ShardedModel& model_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  bool forward_is_new_ = true;  // no unit was used since the last backward
  bool accumulates_ = false;    // the next forward continues a gradient accumulation: shards are unchanged
  std::vector<Unit*> recent_;   // unsharded units that were used, the most recent last
  std::vector<Unit*> current_;  // of the last use()
  std::string computing_;       // their names, if a trace is active
  Trace::Clock::time_point computing_since_;
};

}  // namespace tessera::internal
