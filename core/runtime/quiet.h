#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace tessera::internal {

// Hooks and fallbacks may run under InferenceMode or in a recorded forward; while it lives, what the manager does to
// its own tensors makes no inference tensors and is not recorded.
struct Quiet {
  c10::InferenceMode ordinary{false};
  at::NoGradGuard no_grad;
};

// While it lives `target` may be written to, also if it was made under InferenceMode, outside which nobody may.
class WritesTo {
 public:
  explicit WritesTo(const at::Tensor& target) {
    if (target.is_inference()) as_made_.emplace();
  }

 private:
  std::optional<c10::InferenceMode> as_made_;
};

}  // namespace tessera::internal
