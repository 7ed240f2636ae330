#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace tessera::internal {

// Whether libtorch's _fused_sgd_ computes correct values for parameters of this type, in every supported libtorch. On
// CPUs, versions before the fix of pytorch#191763 skip full vectors of 16-bit parameters, and read momenta as fp32.
// _fused_adam_ and _fused_adamw_ are correct for all types (tests/optim/fused_kernels_test.cpp).
constexpr bool fused_sgd_is_right(at::ScalarType dtype, at::DeviceType device) {
  return device != at::kCPU || (dtype != at::kBFloat16 && dtype != at::kHalf);
}

}  // namespace tessera::internal
