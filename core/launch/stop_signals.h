#pragma once

namespace tessera::internal {

// Catches those signals of stop_requested() that have their default action. Each call needs one call of
// release_stop_signals(); the last one restores them. Thread-safe.
void catch_stop_signals();
void release_stop_signals();

}  // namespace tessera::internal
