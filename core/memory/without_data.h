#pragma once

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While it exists, this thread runs a training program on tensors without data (dry_run()). Code that moves or computes
// data by pointer, which no operator sees, must be skipped.
class WithoutDataScope {
 public:
  WithoutDataScope();

 private:
  const ThreadScope<bool> scope_;
};
bool is_without_data();  // whether this thread is in a WithoutDataScope

// While it exists, this thread waits for every asynchronous transfer that it starts, so that memory use does not depend
// on the speed of a disk (record_run()).
class WaitForTransfersScope {
 public:
  WaitForTransfersScope();

 private:
  const ThreadScope<bool> scope_;
};
bool waits_for_transfers();  // whether this thread is in a WaitForTransfersScope

}  // namespace tessera::internal
