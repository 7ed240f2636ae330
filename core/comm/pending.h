#pragma once

#include "core/runtime/operation_handle.h"
#include "core/memory/memory_kind.h"

namespace tessera {

// The handle of a collective that is under way.
//
// It keeps every tensor of the operation alive, those that the caller gave and those in between,
// until the operation is over. Move-only. Use it from the thread that started the operation.
//
// Destroying a handle that was never waited for is allowed (an exception is unwinding, say): the
// tensors then stay alive as long as the communicator, and the results are unspecified.
class [[nodiscard]] Pending : public OperationHandle<AsyncOperation> {
 public:
  using OperationHandle::OperationHandle;

  // Waits for the operation, at most the group's timeout. The results are then there: in memory (gloo), or ordered
  // into the current stream of the device (NCCL). They may be read, and the tensors changed. A second call returns
  // at once. Throws CommError, which names the operation, the unit and the rank.
  void wait() {
    const MemoryKindScope kind(MemoryKind::kTransport);
    finish();
  }
};

}  // namespace tessera
