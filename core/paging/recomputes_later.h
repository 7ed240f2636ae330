#pragma once

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While an object of this class exists, this thread runs the first forward of a checkpointed() call. Autograd does not
// record it; backward recomputes it and then needs the gradients of its parameters.
class RecomputesLater {
 public:
  static bool in_effect() { return in_effect_; }

 private:
  static inline thread_local bool in_effect_ = false;
  const ThreadScope<bool> scope_{in_effect_, true};
};

}  // namespace tessera::internal
