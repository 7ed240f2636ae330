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

// Unshards and reshards units: prefetches FsdpOptions::prefetch units ahead, keeps the last FsdpOptions::keep_recent
// units, and evicts the least recently used ones. No other class unshards or reshards units, except for a summon. Used
// by one thread at a time.
class UnshardedUnits {
 public:
  explicit UnshardedUnits(ShardedModel& model) : model_(model) {}

  // Reshards units that an earlier pass prefetched but did not use.
  void pre_forward();
  void pre_backward();
  // Must be called before an operator uses the units. Evicts other units, unshards these units, and prefetches the
  // units that followed them in the last pass. Collective.
  void use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward);
  void reshard(Unit& unit);
  void reshard_all();
  // Must follow a backward. The next use outside backward begins a forward. `accumulates`: shards stay unchanged.
  void post_backward(bool accumulates);

  // Ends the trace span for the computation of the last use()'s units.
  void end_compute_span();
  // The unit orders of the last forward and of the last backward that used a unit.
  const PrefetchOrder& forward_order() const { return forward_order_; }
  const PrefetchOrder& backward_order() const { return backward_order_; }
  // Limit of recorded uses, above which repetitions are removed. A pass usually uses a unit fewer than 8 times.
  size_t most_seen() const { return 8 * model_.units().size(); }

 private:
  void drop_secondaries();
  void evict_for(const std::vector<Unit*>& needed, bool is_first_of_backward);
  void prefetch(const PrefetchOrder& order);
  void set_current(std::vector<Unit*> units, Page::GradMode mode);

  ShardedModel& model_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  bool forward_is_new_ = true;  // true: no unit was used since the last backward
  bool accumulates_ = false;    // whether the next forward continues an accumulation, with unchanged shards
  std::vector<Unit*> recent_;   // used units that are still unsharded, the most recent last
  std::vector<Unit*> current_;  // the units of the last use()
  OpenSpan computing_;          // the trace's span of `current_`
};

}  // namespace tessera::internal
