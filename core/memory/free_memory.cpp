#include "core/memory/free_memory.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace tessera::internal {
namespace {

std::optional<int64_t> available_to_system() {
  std::ifstream file("/proc/meminfo");  // has a line "MemAvailable:   1234 kB"
  std::string name;
  for (int64_t kib = 0; file >> name >> kib; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
    if (name == "MemAvailable:") return kib * 1024;
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> free_memory_bytes(c10::Device device, const ControlGroups& groups) {
  if (!device.is_cpu()) {
    try {
      return static_cast<int64_t>(at::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first);
    } catch (const c10::Error&) {  // not every allocator supports this
      return std::nullopt;
    }
  }
  std::optional<int64_t> free_bytes = available_to_system();
  for (const MemoryLimit& limit : memory_limits(groups)) {
    const int64_t left = std::max<int64_t>(0, limit.left_bytes());
    free_bytes = std::min(free_bytes.value_or(left), left);
  }
  return free_bytes;
}

}  // namespace tessera::internal
