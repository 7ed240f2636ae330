#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "fsdp/prefetch_order.h"
#include "fsdp/sharded_model.h"
#include "fsdp/unit.h"

namespace tessera::internal {

// Which units are gathered, and which go for them: least recently used first, as many ahead as FsdpOptions::prefetch
// says. Sole writer of the units' states, but for pinned ones. Used by one thread at a time.
class ResidentUnits {
 public:
  explicit ResidentUnits(ShardedModel& model) : model_(model) {}

  // Nothing is in use, and what was prefetched for a pass that took another way goes.
  void begin_forward();
  void begin_backward();
  // An operator needs these units: evicts others beyond keep_recent, and as backward begins those that are large and
  // whose ranks read each other's memory, gathers these, unless a prefetch did, then starts gathering the units that
  // followed them last time.
  void use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward);
  void release(Unit& unit);
  void release_all();
  // The next use that is no backward's begins another forward, `accumulates`: with the shards as they are.
  void expect_forward(bool accumulates);

  // For the trace: the units of the last use() compute until now.
  void computing_ends();
  // The order of units in the last passes that used any, a line each.
  void describe(std::ostream& text) const;

 private:
  void drop_secondaries();
  void evict_for(const std::vector<Unit*>& needed, bool turns);
  void prefetch(const PrefetchOrder& order);
  void set_current(std::vector<Unit*> units, Page::GradMode mode);
  void describe(std::ostream& text, const char* pass, const PrefetchOrder& order) const;

  ShardedModel& model_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  bool forward_is_new_ = true;  // no unit was used since the last backward
  bool accumulates_ = false;    // nor will anybody have written to shards
  std::vector<Unit*> recent_;   // units that were used and are resident, the latest last
  std::vector<Unit*> current_;  // of the last operator that came here
  std::string computing_;       // their names, while they are being traced
  Trace::Clock::time_point computing_since_;
};

}  // namespace tessera::internal
