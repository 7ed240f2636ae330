#pragma once

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While it lives, this thread runs a training program on tensors without data (dry_run()). What moves or computes
// numbers by pointer, where no operator sees it, is then left out.
class WithoutDataScope {
 public:
  WithoutDataScope();

 private:
  const ThreadScope<bool> scope_;
};
bool is_without_data();  // of this thread

// While it lives, what this thread makes that moves data beside the program is waited for as soon as it begins, so that
// which memory is taken when does not depend on how fast a disk is (record_run()).
class WaitForTransfersScope {
 public:
  WaitForTransfersScope();

 private:
  const ThreadScope<bool> scope_;
};
bool waits_for_transfers();  // of this thread

}  // namespace tessera::internal
