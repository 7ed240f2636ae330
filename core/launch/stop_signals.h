#pragma once

namespace tessera::internal {

// Catches the signals of stop_requested() that have their default action, until as many calls of
// release_stop_signals(). Thread-safe.
void catch_stop_signals();
void release_stop_signals();

}  // namespace tessera::internal
