#pragma once

#include <ATen/core/Tensor.h>

#include <ostream>
#include <utility>

namespace tessera {

// The norm of gradients, which a device may still be computing. Conversion to double waits for it. So a loop that only
// clips never blocks the host; read the norm every few steps.
class GradNorm {
 public:
  GradNorm(double value) : value_(value) {}                             // NOLINT(google-explicit-constructor): a double
  explicit GradNorm(at::Tensor tensor) : tensor_(std::move(tensor)) {}  // of one element, on any device

  // The norm on its device, which may still be computing it. Undefined if the norm is, or has been read, on the host.
  const at::Tensor& on_device() const { return tensor_; }
  // Blocks at the first call.
  operator double() const {  // NOLINT(google-explicit-constructor)
    if (tensor_.defined()) value_ = std::exchange(tensor_, at::Tensor()).item<double>();
    return value_;
  }

 private:
  mutable double value_ = 0;
  mutable at::Tensor tensor_;
};
// Blocks for the value.
inline std::ostream& operator<<(std::ostream& out, const GradNorm& norm) { return out << static_cast<double>(norm); }

}  // namespace tessera
