#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace tessera::internal {

// While this guard exists, operators of its thread make ordinary tensors, and autograd does not record them. Used by
// hooks and fallbacks, which may run under InferenceMode or in a forward that autograd records.
struct NoGradNoInferenceGuard {
  c10::InferenceMode ordinary{false};
  at::NoGradGuard no_grad;
};

// While this object exists, this thread may write to `target`, even if `target` is an inference tensor.
class WritesTo {
 public:
  explicit WritesTo(const at::Tensor& target) {
    if (target.is_inference()) as_made_.emplace();
  }

 private:
  std::optional<c10::InferenceMode> as_made_;
};

}  // namespace tessera::internal
