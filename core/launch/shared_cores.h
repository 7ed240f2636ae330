#pragma once

#include "core/launch/launch_environment.h"

namespace tessera::internal {

// Implements ProcessSetup::share_cores on a host with available_cores() of `cores`. Thread-safe.
void share_cores(const LaunchEnvironment& environment, int cores);

// Restores the number of threads that share_cores() has changed, unless the program has changed it since.
void stop_sharing_cores();

}  // namespace tessera::internal
