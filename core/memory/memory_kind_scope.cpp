#include "core/memory/memory_kind_scope.h"

#include <atomic>

namespace tessera::internal {

static thread_local MemoryKind current_kind = MemoryKind::kUnknown;

MemoryKindScope::MemoryKindScope(MemoryKind kind) : scope_(current_kind, kind) {}
MemoryKind MemoryKindScope::current() { return current_kind; }

static std::atomic<DiskBytesCounter> disk_bytes_counter = nullptr;

void set_disk_bytes_counter(DiskBytesCounter counter) { disk_bytes_counter = counter; }

std::shared_ptr<void> count_disk_bytes(int64_t bytes) {
  const DiskBytesCounter counter = disk_bytes_counter;
  return counter == nullptr ? nullptr : counter(bytes);
}

}  // namespace tessera::internal

namespace tessera {
using namespace internal;

std::string_view name_of(MemoryKind kind) {
  static constexpr std::string_view kNames[kMemoryKinds] = {
      "unknown",     "parameters",  "gathered", "secondary", "buckets", "gradients", "optimizer",
      "activations", "temporaries", "staging",  "host",      "disk",    "transport", "scratch"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace tessera
