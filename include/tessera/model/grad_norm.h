#pragma once

#include <ATen/core/Tensor.h>

#include <ostream>
#include <utility>

namespace tessera {

// The norm of gradients: a double, which on a device is still being computed. Converting it waits for it, so a loop
// that only clips never stops the host; look at it every so many steps.
class GradNorm {
 public:
  GradNorm(double value) : value_(value) {}                             // NOLINT(google-explicit-constructor): a double
  explicit GradNorm(at::Tensor tensor) : tensor_(std::move(tensor)) {}  // of one element, on any device

  // Waits for it, the first time.
  operator double() const {  // NOLINT(google-explicit-constructor)
    if (tensor_.defined()) value_ = std::exchange(tensor_, at::Tensor()).item<double>();
    return value_;
  }

 private:
  mutable double value_ = 0;
  mutable at::Tensor tensor_;
};
// As a number: waits for it.
inline std::ostream& operator<<(std::ostream& out, const GradNorm& norm) { return out << static_cast<double>(norm); }

}  // namespace tessera
