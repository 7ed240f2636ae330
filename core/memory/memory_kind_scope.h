#pragma once

#include <cstdint>
#include <memory>

#include <tessera/plan/memory_kind.h>

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While this object exists, tensors that its thread makes have this kind, for record_run(). Scopes nest.
class MemoryKindScope {
 public:
  explicit MemoryKindScope(MemoryKind kind);

  static MemoryKind current();  // kind of this thread; kUnknown without a scope

 private:
  const ThreadScope<MemoryKind> scope_;
};

// Counts `bytes` that the calling thread allocates on a disk, until the result is destroyed.
using DiskBytesCounter = std::shared_ptr<void> (*)(int64_t bytes);

// Sets the process's counter of disk bytes, with which record_run() and dry_run() measure MemoryKind::kDisk.
void set_disk_bytes_counter(DiskBytesCounter counter);
// Must be called when bytes are allocated on a disk. Returns null if there is no counter.
std::shared_ptr<void> count_disk_bytes(int64_t bytes);

}  // namespace tessera::internal
