#pragma once

#include <c10/core/Device.h>

#include "core/launch/launch_environment.h"

namespace tessera::internal {

// The CUDA device of a rank, of the `visible_count` that its process sees: the one that it asks for by index, else the
// only one (schedulers that give each process its own show it alone), else that of its local rank. Throws
// std::invalid_argument for one that is not there.
c10::Device choose_cuda_device(c10::Device wanted, const LaunchEnvironment& environment, int visible_count);

// How many CUDA devices this process sees; 0 without CUDA in the build.
int visible_cuda_devices();

// The device is this thread's current one from now on: what asks for kCUDA without an index means it.
void use_cuda_device(c10::Device device);

}  // namespace tessera::internal
