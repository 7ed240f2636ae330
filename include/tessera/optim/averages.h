#pragma once

#include <tessera/scope_exit.h>

namespace tessera {

// The interface of optimizers that keep averages of the parameters for evaluation (ScheduleFreeAdamW, also under OSS).
class Averages {
 public:
  virtual ~Averages() = default;
  // Replaces the parameters by their averages until the scope ends, then restores the parameters bit for bit. Allocates
  // a copy of the parameters that this rank steps. The optimizer must outlive the scope. Under OSS, this call and the
  // end of the scope are collective. Throws std::logic_error if a scope is open, or if keeps_averages() is false.
  virtual ScopeExit swap_in_averages() = 0;
  // Returns whether a scope of swap_in_averages() is open. Until that scope ends, step() must not be called.
  virtual bool are_swapped_in() const = 0;
  // Returns whether swap_in_averages() is supported: false only if OSS wraps an optimizer without averages.
  virtual bool keeps_averages() const { return true; }
};

}  // namespace tessera
