#pragma once

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While one lives, this thread is in the first forward of a checkpointed() call: autograd does not record it, but
// backward will compute it again and then ask for its parameters' gradients.
class RecomputesLater {
 public:
  static bool in_effect() { return in_effect_; }

 private:
  static inline thread_local bool in_effect_ = false;
  const ThreadScope<bool> scope_{in_effect_, true};
};

}  // namespace tessera::internal
