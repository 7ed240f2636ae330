#pragma once

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

// While this object exists, its thread runs a training program on tensors without data (dry_run()). Code that accesses
// data by pointer instead of operators must be skipped.
class WithoutDataScope : public ThreadCondition<WithoutDataScope> {};
inline bool is_without_data() { return WithoutDataScope::in_effect(); }

// While this object exists, its thread waits for every asynchronous transfer that it starts. So memory use does not
// depend on the speed of a disk (record_run()).
class WaitForTransfersScope : public ThreadCondition<WaitForTransfersScope> {};
inline bool waits_for_transfers() { return WaitForTransfersScope::in_effect(); }

}  // namespace tessera::internal
