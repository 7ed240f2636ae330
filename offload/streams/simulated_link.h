#pragma once

#include <cstdint>
#include <functional>

#include "core/runtime/copy_engine.h"
#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// For tests: how the link between host and device behaves where the device is the CPU itself, so that order, overlap
// and failures can be tried without an accelerator.
struct SimulatedLink {
  // A copy takes at least its bytes divided by this, each direction for itself. 0: no lower bound.
  double bytes_per_s = 0;
  // Called before each copy on the thread that makes it, one thread a direction: it may wait, which holds back all
  // later copies of that direction, and may throw, which makes the copy fail.
  std::function<void(CopyDirection direction, int64_t bytes)> before_copy;
};

// While it lives, every CopyEngine that this thread makes (a wrapper's, when it is constructed) has this link, and
// keeps it afterwards. Making one for another device than the CPU throws std::invalid_argument.
class SimulatedLinkScope {
 public:
  explicit SimulatedLinkScope(SimulatedLink link);

  // Null: none lives on this thread.
  static const SimulatedLink* current();

 private:
  const SimulatedLink link_;
  const ThreadScope<const SimulatedLink*> scope_;
};

}  // namespace tessera::internal
