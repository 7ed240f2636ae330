#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace tessera {

// Hooks and fallbacks may run under InferenceMode or in a recorded forward; while it lives, what the manager does to
// its own tensors makes no inference tensors and is not recorded.
struct Quiet {
  c10::InferenceMode ordinary{false};
  at::NoGradGuard no_grad;
};

}  // namespace tessera
