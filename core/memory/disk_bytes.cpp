#include "core/memory/disk_bytes.h"

#include <atomic>

namespace tessera::internal {

static std::atomic<DiskBytesCounter> disk_bytes_counter = nullptr;

void set_disk_bytes_counter(DiskBytesCounter counter) { disk_bytes_counter = counter; }

std::shared_ptr<void> count_disk_bytes(int64_t bytes) {
  const DiskBytesCounter counter = disk_bytes_counter;
  return counter == nullptr ? nullptr : counter(bytes);
}

}  // namespace tessera::internal
