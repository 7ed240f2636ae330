#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/flat/scope.h"

namespace tessera {

// A wrapper that tells when gradients are final, so that an optimizer need not wait for the whole of
// backward.
class GradientSource {
 public:
  virtual ~GradientSource() = default;

  // While the scope lives, `arrived` is called for each set of parameters whose .grad has just become
  // the average over ranks, on the thread that runs backward; it should return soon, and what it
  // throws leaves backward. It is not called for a backward that does not reduce (no_sync()). One
  // observer at a time; throws std::logic_error for a second, and inside a backward pass.
  using Arrived = std::function<void(const std::vector<at::Tensor>& parameters)>;
  virtual Scope on_gradients(Arrived arrived) = 0;

  virtual double clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) = 0;
};

}  // namespace tessera
