#pragma once

#include <tessera/plan/memory_kind.h>

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While this object exists, tensors that its thread makes have this kind, for record_run(). Scopes nest.
class MemoryKindScope {
 public:
  // Sets the kind until this object is destroyed.
  explicit MemoryKindScope(MemoryKind kind);

  static MemoryKind current();  // kind of this thread; kUnknown without a scope

 private:
  const ThreadScope<MemoryKind> scope_;
};

}  // namespace tessera::internal
