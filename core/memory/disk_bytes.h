#pragma once

#include <cstdint>
#include <memory>

namespace tessera::internal {

// Told of bytes that are claimed on a disk; the result stands for them until it goes. Of the thread that claims them.
using DiskBytesCounter = std::shared_ptr<void> (*)(int64_t bytes);

// Who counts memory by kind (record_run(), dry_run()) counts these, too: MemoryKind::kDisk. One in a process.
void set_disk_bytes_counter(DiskBytesCounter counter);
// By who claims them. Null if nobody counts.
std::shared_ptr<void> count_disk_bytes(int64_t bytes);

}  // namespace tessera::internal
