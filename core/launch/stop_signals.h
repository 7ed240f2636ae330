#pragma once

namespace tessera::internal {

// Catches the signals of stop_requested() whose action is the default. Each call must be followed by one call of
// release_stop_signals(). The last of these calls restores the actions. Thread-safe.
void catch_stop_signals();
void release_stop_signals();

}  // namespace tessera::internal
