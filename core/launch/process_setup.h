#pragma once

#include <tessera/launch.h>

namespace tessera::internal {

// Applies the changes of a ProcessSetup until it is destroyed. Every group of init() or run_ranks() owns one. A change
// is undone when the last object that made it is destroyed. Thread-safe.
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
