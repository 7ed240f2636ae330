#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

namespace tessera::internal {

// Whether libtorch's _fused_sgd_ computes correct values for parameters of this type, in every supported libtorch. On
// CPUs, versions before the fix of pytorch#191763 skip full vectors of 16-bit parameters, and read momenta as fp32.
// _fused_adam_ and _fused_adamw_ are correct for all types (tests/optim/fused_kernels_test.cpp).
constexpr bool fused_sgd_is_right(at::ScalarType dtype, at::DeviceType device) {
  return device != at::kCPU || (dtype != at::kBFloat16 && dtype != at::kHalf);
}

// The learning rate by which a fused kernel steps this parameter. Kernels of a device read that of a recorded step from
// memory, in fp32 (CapturedStep), so eager steps round it too. CUDA's Adam rounds it anyway, except for fp64.
inline double rate_of_kernels(double lr, const at::Tensor& parameter) {
  return parameter.is_cpu() || parameter.scalar_type() == at::kDouble ? lr : static_cast<float>(lr);
}

// Whether the optimizer is a fused one, and not of a derived class, whose step() may do more: in a recording its step()
// is recorded, and adds its host's part (CapturedWork::add_step()).
bool has_recordable_step(const torch::optim::Optimizer& optimizer);

}  // namespace tessera::internal
