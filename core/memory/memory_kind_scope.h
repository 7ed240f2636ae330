#pragma once

#include <tessera/plan/memory_kind.h>

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While it lives, tensors that this thread makes are of this kind, for those who count them (record_run()). Inner
// scopes count. Costs nothing else.
class MemoryKindScope {
 public:
  // From now on.
  explicit MemoryKindScope(MemoryKind kind);

  static MemoryKind current();  // of this thread; kUnknown without a scope

 private:
  const ThreadScope<MemoryKind> scope_;
};

}  // namespace tessera::internal
