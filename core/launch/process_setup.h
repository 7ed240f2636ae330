#pragma once

#include <tessera/launch.h>

namespace tessera::internal {

// Applies the changes of a ProcessSetup while this object exists. Every group of init() or run_ranks() owns such an
// object. A change is undone when the last object whose ProcessSetup has this change is destroyed. Thread-safe.
class ProcessEffects {
 public:
  explicit ProcessEffects(const ProcessSetup& setup);
  ~ProcessEffects();
  ProcessEffects(const ProcessEffects&) = delete;
  ProcessEffects& operator=(const ProcessEffects&) = delete;

 private:
  const ProcessSetup setup_;
};

}  // namespace tessera::internal
