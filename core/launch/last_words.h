#pragma once

namespace tessera::internal {

// An exception that nobody catches ends the process without the destructors of its groups, and the other ranks would
// learn that it has ended, not why. From now on std::terminate() first tells them the text of the exception
// (StallWatch::publish_failure_of_process()), and then does what it did before. Thread-safe.
void tell_when_terminated();

// Restores the handler from before, unless the program has set another one since: that one may call this one.
void stop_telling_when_terminated();

}  // namespace tessera::internal
