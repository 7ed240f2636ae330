#pragma once

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While this object exists, its thread runs a training program on tensors without data (dry_run()). Code that accesses
// data by pointer instead of operators must be skipped.
class WithoutDataScope {
 public:
  WithoutDataScope();

 private:
  const ThreadScope<bool> scope_;
};
bool is_without_data();  // whether this thread is in a WithoutDataScope

// While this object exists, its thread waits for every asynchronous transfer that it starts. So memory use does not
// depend on the speed of a disk (record_run()).
class WaitForTransfersScope {
 public:
  WaitForTransfersScope();

 private:
  const ThreadScope<bool> scope_;
};
bool waits_for_transfers();  // whether this thread is in a WaitForTransfersScope

}  // namespace tessera::internal
