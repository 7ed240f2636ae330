#pragma once

#include <cstdint>
#include <functional>

#include "core/runtime/copy_engine.h"
#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// For tests: simulates a link between host and device on the CPU, to test order, overlap and failures without an
// accelerator.
struct SimulatedLink {
  // A copy takes at least its bytes divided by this, independently in each direction. 0: no lower bound.
  double bytes_per_s = 0;
  // Called before each copy, on its direction's thread. May block, which delays later copies of that direction, and may
  // throw, which makes the copy fail.
  std::function<void(CopyDirection direction, int64_t bytes)> before_copy;
};

// While it exists, every CopyEngine made on this thread, e.g. by a wrapper's constructor, keeps this link for the
// engine's lifetime. Making an engine for a device other than the CPU throws std::invalid_argument.
class SimulatedLinkScope {
 public:
  explicit SimulatedLinkScope(SimulatedLink link);

  // Returns this thread's current link, or null.
  static const SimulatedLink* current();

 private:
  const SimulatedLink link_;
  const ThreadScope<const SimulatedLink*> scope_;
};

}  // namespace tessera::internal
