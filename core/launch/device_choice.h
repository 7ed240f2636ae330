#pragma once

#include <c10/core/Device.h>

#include "core/launch/launch_environment.h"

namespace tessera::internal {

// Chooses a rank's CUDA device among `visible_count` devices. If `wanted` has an index, chooses that device. Otherwise,
// if only one device is visible, chooses that one (some schedulers show each process only its own device). Otherwise,
// the local rank is the index. Throws std::invalid_argument if there is no such device or the local rank is unknown.
c10::Device choose_cuda_device(c10::Device wanted, const LaunchEnvironment& environment, int visible_count);

// Returns the number of CUDA devices that this process sees; 0 in a build without CUDA.
int visible_cuda_devices();

}  // namespace tessera::internal
