#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::internal {

// Records the operators of the current thread in its current Recorder, for the lifetime of the object. If the Recorder
// has no data, does not run operators with void arguments, and returns tensors without values instead.
//
// Intercepts operators with libtorch's dispatch key `Fake`, below autograd and above every backend. So autograd,
// composite operators and the wrappers run unchanged on CPU tensors, and create the same tensors as with data. Gets
// result shapes from shape_rule_of() or the operator's meta kernel. An operator that has neither runs on zeros if its
// arguments have at most 32 MiB. Throws std::invalid_argument for larger arguments, or if shapes depend on values.
class RecordedOperators {
 public:
  // Throws std::runtime_error if another library uses the dispatch key.
  RecordedOperators();

 private:
  c10::impl::IncludeDispatchKeyGuard included_;
};

}  // namespace tessera::internal
