#pragma once

#include <tessera/scope_exit.h>

namespace tessera {

// An optimizer whose averages of the parameters are used for evaluation (ScheduleFreeAdamW, also under OSS).
class Averages {
 public:
  virtual ~Averages() = default;
  // Replaces the parameters by their averages until the scope ends, then restores the parameters bit for bit. Allocates
  // a copy of the parameters that this rank steps. The optimizer must outlive the scope. Under OSS, both ends of the
  // scope are collective. Throws std::logic_error if a scope is open, and under OSS without averages.
  virtual ScopeExit swap_in_averages() = 0;
  // Whether a scope is open. While it is, step() must not be called.
  virtual bool are_swapped_in() const = 0;
  // Whether swap_in_averages() is supported. False if OSS wraps an optimizer without averages.
  virtual bool keeps_averages() const { return true; }
};

}  // namespace tessera
