#pragma once

#include <cstdint>
#include <functional>

#include "core/runtime/copy_engine.h"
#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// The properties of a simulated link between host and device, for CopyEngines on the CPU. With it, tests of order,
// overlap and failures need no accelerator.
struct SimulatedLink {
  // A copy takes at least its bytes divided by this rate. Each direction has the full rate. 0: no lower bound.
  double bytes_per_s = 0;
  // Called before each copy, on the thread of the copy's direction. The function may block, which delays later copies
  // in that direction, or throw, which makes the copy fail.
  std::function<void(CopyDirection direction, int64_t bytes)> before_copy;
};

// Within the scope, each CopyEngine that this thread makes (for example in a wrapper's constructor) uses the link, also
// after the scope ends. Making an engine for a device other than the CPU throws std::invalid_argument.
class SimulatedLinkScope {
 public:
  explicit SimulatedLinkScope(SimulatedLink link);

  // Returns this thread's current link; null if there is none.
  static const SimulatedLink* current();

 private:
  const SimulatedLink link_;
  const ThreadScope<const SimulatedLink*> scope_;
};

}  // namespace tessera::internal
