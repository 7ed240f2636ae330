#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/paging/residency.h"
#include "core/trace/open_span.h"
#include "fsdp/prefetch_order.h"
#include "fsdp/sharded_model.h"
#include "fsdp/unit.h"

namespace tessera::internal {

// Decides which units are unsharded: prefetches FsdpOptions::prefetch units ahead, keeps FsdpOptions::keep_recent, and
// evicts the least recently used ones. Only UnshardedUnits unshards and reshards units, except summoned ones. Used by
// one thread at a time.
class UnshardedUnits {
 public:
  explicit UnshardedUnits(ShardedModel& model) : model_(model) {}

  // Reshards units that an earlier pass prefetched and did not use.
  void pre_forward();
  void pre_backward();
  // Must be called before an operator uses the units. Evicts other units, unshards these units, and prefetches the
  // units that followed them in the last pass. Collective.
  void use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward);
  void reshard(Unit& unit);
  void reshard_all();
  // Must be called after a backward. The next use outside one begins a forward. `accumulates`: shards stay unchanged.
  void post_backward(bool accumulates);

  // Ends the trace's span of computation of the units of the last use().
  void end_compute_span();
  // The order of units in the last forward and in the last backward that used any unit.
  const PrefetchOrder& forward_order() const { return forward_order_; }
  const PrefetchOrder& backward_order() const { return backward_order_; }
  // The number of uses above which repetitions are removed: a pass uses a unit fewer than 8 times on average.
  size_t most_seen() const { return 8 * model_.units().size(); }

 private:
  void drop_secondaries();
  void evict_for(const std::vector<Unit*>& needed, bool is_first_of_backward);
  void prefetch(const PrefetchOrder& order);
  void set_current(std::vector<Unit*> units, Page::GradMode mode);

  ShardedModel& model_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  bool forward_is_new_ = true;  // no unit was used since the last backward
  bool accumulates_ = false;    // whether the next forward continues a gradient accumulation: shards are unchanged
  std::vector<Unit*> recent_;   // unsharded units that were used, the most recent last
  std::vector<Unit*> current_;  // the units of the last use()
  OpenSpan computing_;          // the trace's span of `current_`
};

}  // namespace tessera::internal
