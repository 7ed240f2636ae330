#pragma once

#include <cstdint>
#include <memory>

namespace tessera::internal {

// Called with the number of bytes that a thread allocates on a disk. The bytes count until the result is destroyed.
using DiskBytesCounter = std::shared_ptr<void> (*)(int64_t bytes);

// Sets the process's counter of disk bytes, with which record_run() and dry_run() measure MemoryKind::kDisk.
void set_disk_bytes_counter(DiskBytesCounter counter);
// Must be called when bytes are allocated on a disk. Returns null if there is no counter.
std::shared_ptr<void> count_disk_bytes(int64_t bytes);

}  // namespace tessera::internal
