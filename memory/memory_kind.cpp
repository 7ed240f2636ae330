#include "tessera/memory/memory_kind.h"

#include <utility>

namespace tessera {

static thread_local MemoryKind current_kind = MemoryKind::kUnknown;

std::string_view name_of(MemoryKind kind) {
  static constexpr std::string_view kNames[kMemoryKinds] = {
      "unknown",     "parameters",  "gathered", "secondary", "buckets", "gradients", "optimizer",
      "activations", "temporaries", "staging",  "host",      "disk",    "transport", "scratch"};
  return kNames[static_cast<size_t>(kind)];
}

MemoryKindScope::MemoryKindScope(MemoryKind kind) : before_(std::exchange(current_kind, kind)) {}
MemoryKindScope::~MemoryKindScope() { current_kind = before_; }
MemoryKind MemoryKindScope::current() { return current_kind; }

}  // namespace tessera
