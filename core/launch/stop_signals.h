#pragma once

namespace tessera::internal {

// Catches those signals of stop_requested() whose action is the default. Each call needs a call of
// release_stop_signals(), the last of which restores the actions. Thread-safe.
void catch_stop_signals();
void release_stop_signals();

}  // namespace tessera::internal
