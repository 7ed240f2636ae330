#pragma once

#include <tessera/scope.h>

namespace tessera {

// An optimizer that evaluates at other values than it trains at (ScheduleFreeAdamW, also under OSS).
class Averages {
 public:
  virtual ~Averages() = default;
  // While the scope lives, the parameters are the averages; then bit for bit what they were. Takes the memory of the
  // parameters that are stepped here once more. Collective under OSS, and so is ending the scope. Throws
  // std::logic_error for a second scope at a time, and under OSS if the optimizer keeps no averages.
  virtual Scope swap_in_averages() = 0;
  // Whether such a scope lives: no step is to be taken then.
  virtual bool are_swapped_in() const = 0;
  // false: under OSS, of an optimizer that evaluates where it trains.
  virtual bool keeps_averages() const { return true; }
};

}  // namespace tessera
