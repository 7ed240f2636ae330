#pragma once

#include <cstdint>

namespace tessera::internal {

// The traffic of a copy engine since its construction.
struct CopyTraffic {
  int64_t to_device_bytes = 0;
  int64_t to_host_bytes = 0;
  int64_t copies = 0;
  int64_t late_copies = 0;  // copies that were incomplete at their first wait, and so not fully overlapped
};

}  // namespace tessera::internal
