#pragma once

namespace tessera::internal {

// Installs a std::terminate() handler that first publishes the exception's text in all groups of this process
// (Watchdog::publish_failure_of_process()), and then calls the previous handler. Without the handler, the other ranks
// would not get the reason, because an uncaught exception ends the process without destructors. Thread-safe.
void tell_when_terminated();

// Restores the previous handler, unless the program has set another handler, which may call ours. Thread-safe.
void stop_telling_when_terminated();

}  // namespace tessera::internal
