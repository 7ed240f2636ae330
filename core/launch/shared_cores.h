#pragma once

#include <tessera/launch.h>
#include "core/launch/launch_environment.h"

namespace tessera::internal {

// Implements ProcessSetup::share_cores on a host, or in a container, with `cores` cores. Thread-safe.
void share_cores(const LaunchEnvironment& environment, int cores = available_cores());

// Restores the number of threads that share_cores() has changed, unless the program has changed it since.
void stop_sharing_cores();

}  // namespace tessera::internal
