#pragma once

#include <tessera/scope_exit.h>

namespace tessera {

// An optimizer that evaluates with averaged parameters (ScheduleFreeAdamW, also under OSS).
class Averages {
 public:
  virtual ~Averages() = default;
  // Replaces the parameters by their averages until the scope ends, then restores their bits. Allocates a copy of the
  // parameters that this rank steps. The optimizer must outlive the scope. Under OSS, both ends of the scope are
  // collective. Throws std::logic_error if a scope is already open, and under OSS if the optimizer keeps no averages.
  virtual ScopeExit swap_in_averages() = 0;
  // Whether a scope is open; step() must not be called then.
  virtual bool are_swapped_in() const = 0;
  // False if the optimizer under OSS has no averages.
  virtual bool keeps_averages() const { return true; }
};

}  // namespace tessera
