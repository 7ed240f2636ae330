#pragma once

#include <ATen/core/Tensor.h>

#include <ostream>
#include <utility>

namespace tessera {

// The norm of gradients, which a device may still be computing. Conversion to double blocks until the norm is computed.
// A loop that only clips never blocks the host. A loop that logs the norm should read it only every few steps.
class GradNorm {
 public:
  GradNorm(double value) : value_(value) {}  // NOLINT(google-explicit-constructor): implicit, like the conversion back
  explicit GradNorm(at::Tensor tensor) : tensor_(std::move(tensor)) {}  // `tensor` must have one element; any device

  // Returns the tensor of the norm. Undefined if this object was made from a double, or has been converted to one.
  const at::Tensor& on_device() const { return tensor_; }
  // Returns the norm. The first call blocks until a device has computed it.
  operator double() const {  // NOLINT(google-explicit-constructor): torch's clip_grad_norm_() returns a double
    if (tensor_.defined()) value_ = std::exchange(tensor_, at::Tensor()).item<double>();
    return value_;
  }

 private:
  mutable double value_ = 0;
  mutable at::Tensor tensor_;
};
// Writes the norm. Blocks until the norm is computed.
inline std::ostream& operator<<(std::ostream& out, const GradNorm& norm) { return out << static_cast<double>(norm); }

}  // namespace tessera
