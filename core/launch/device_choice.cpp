#include "core/launch/device_choice.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/runtime/require.h"

namespace tessera::internal {

c10::Device choose_cuda_device(c10::Device wanted, const LaunchEnvironment& environment, int visible_count) {
  const auto at = [](int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); };
  if (wanted.has_index()) {
    require(wanted.index() < visible_count, "tessera::init: InitOptions::device is ", wanted,
            ", but this process sees ", visible_count, " CUDA devices (CUDA_VISIBLE_DEVICES)");
    return wanted;
  }
  if (visible_count == 1) return at(0);
  require(environment.local_rank >= 0, "tessera::init: the launcher (", environment.launcher,
          ") does not say which rank of its host this is, so no CUDA device can be chosen; set LOCAL_RANK, or "
          "InitOptions::device with an index");
  require(environment.local_rank < visible_count, "tessera::init: LOCAL_RANK is ", environment.local_rank,
          ", but this process sees ", visible_count,
          " CUDA devices (CUDA_VISIBLE_DEVICES): start at most one rank for each");
  return at(environment.local_rank);
}

int visible_cuda_devices() {
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) ? c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount() : 0;
}

}  // namespace tessera::internal
