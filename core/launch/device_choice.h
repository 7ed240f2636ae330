#pragma once

#include <c10/core/Device.h>

#include "core/launch/launch_environment.h"

namespace tessera::internal {

// Chooses a rank's CUDA device among `visible_count` devices. If `wanted` has an index, chooses the device with that
// index. Otherwise chooses the only visible device (some schedulers show each process only its own device), or else the
// device of the local rank. Throws std::invalid_argument if there is no such device.
c10::Device choose_cuda_device(c10::Device wanted, const LaunchEnvironment& environment, int visible_count);

// Returns the number of CUDA devices visible to this process; 0 without CUDA in the build.
int visible_cuda_devices();

// Makes `device` this thread's current device, to which kCUDA without an index refers.
void use_cuda_device(c10::Device device);

}  // namespace tessera::internal
