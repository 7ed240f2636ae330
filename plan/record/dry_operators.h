#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace tessera::internal {

// While it lives, operators of this thread are written down by its current Recorder; if that has no data, those that
// would compute with values that mean nothing are not run, and give tensors without values instead.
//
// The key is libtorch's `Fake`, below autograd and above every backend, so that autograd, composite operators and the
// wrappers run as ever, on CPU tensors: each makes the tensors that it would make with data. Of an operator with a CPU
// kernel the shapes come from its meta kernel or shape_rule_of(). One that has neither and few bytes is run, on what
// the memory holds; one that needs values, or is large, throws std::invalid_argument with its name.
class RecordedOperators {
 public:
  // Throws std::runtime_error if another library has taken the dispatch key.
  RecordedOperators();

 private:
  c10::impl::IncludeDispatchKeyGuard included_;
};

}  // namespace tessera::internal
