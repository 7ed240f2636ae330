#pragma once

#include <cstdint>

namespace tessera::internal {

// What an engine has copied since it was made.
struct CopyTraffic {
  int64_t to_device_bytes = 0;
  int64_t to_host_bytes = 0;
  int64_t copies = 0;
  int64_t late_copies = 0;  // of these, were not over when somebody first waited: not hidden entirely
};

}  // namespace tessera::internal
