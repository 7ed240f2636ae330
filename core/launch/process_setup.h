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

// The functions below make and undo single changes, for ProcessEffects. They are thread-safe.

// Catches the signals of stop_requested() whose action is the default. Each call must be followed by one call of
// release_stop_signals(). The last of these calls restores the actions.
void catch_stop_signals();
void release_stop_signals();

// Installs a std::terminate() handler that first publishes the exception's text in all groups of this process: an
// uncaught exception ends the process without destructors (Watchdog::publish_failure_of_process()). Then it calls the
// previous handler. If that is libstdc++'s default handler, it prints one line and calls std::abort() instead.
void tell_when_terminated();
// Restores the previous handler, unless the program has set another handler, which may call ours.
void stop_telling_when_terminated();

}  // namespace tessera::internal
