#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace tessera::internal {

// While an object exists, records the operators of this thread in the thread's current Recorder. If the Recorder has no
// data, does not run operators with void arguments, and returns tensors without values instead.
//
// The dispatch key is libtorch's `Fake`, below autograd and above every backend. So autograd, composite operators and
// the wrappers run unchanged on CPU tensors, and create the same tensors as with data. Shapes of an operator with a CPU
// kernel come from its meta kernel or shape_rule_of(). An operator with neither runs on zeros if its arguments are at
// most 32 MiB. If they are larger, or shapes depend on values, throws std::invalid_argument with its name.
class RecordedOperators {
 public:
  // Throws std::runtime_error if another library uses the dispatch key.
  RecordedOperators();

 private:
  c10::impl::IncludeDispatchKeyGuard included_;
};

}  // namespace tessera::internal
