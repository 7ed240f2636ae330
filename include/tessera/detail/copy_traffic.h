#pragma once

#include <cstdint>

namespace tessera::internal {

// The copies of an engine since it was made.
struct CopyTraffic {
  int64_t to_device_bytes = 0;
  int64_t to_host_bytes = 0;
  int64_t copies = 0;
  int64_t late_copies = 0;  // incomplete at their first wait, so not hidden entirely
};

}  // namespace tessera::internal
