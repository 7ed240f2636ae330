#pragma once

namespace tessera::internal {

// An exception that nobody catches ends the process without the destructors of its groups, and the other ranks would
// learn that it has ended, not why. From now on std::terminate() first tells them the text of the exception
// (StallWatch::publish_failure_of_process()), and then does what it did before. Thread-safe.
void tell_when_terminated();

}  // namespace tessera::internal
