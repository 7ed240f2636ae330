#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

namespace tessera::internal {

// Returns whether libtorch's _fused_sgd_ computes correct values for parameters of this type, in every supported
// libtorch. On CPUs, versions before the fix of pytorch#191763 skip full vectors of 16-bit parameters, and read momenta
// as fp32. _fused_adam_ and _fused_adamw_ are correct for all types (tests/optim/fused_kernels_test.cpp).
constexpr bool fused_sgd_is_right(at::ScalarType dtype, at::DeviceType device) {
  return device != at::kCPU || (dtype != at::kBFloat16 && dtype != at::kHalf);
}

// Returns the learning rate for a fused kernel. In a recorded step (CapturedStep), kernels of a device read the rate
// from memory in fp32, so eager steps round it, too. Except for fp64, CUDA's Adam rounds it anyway.
inline double rate_of_kernels(double lr, const at::Tensor& parameter) {
  return parameter.is_cpu() || parameter.scalar_type() == at::kDouble ? lr : static_cast<float>(lr);
}

// Returns whether CapturedStep can record the optimizer's step(), which then adds its part on the host by
// CapturedWork::add_step(). True for fused optimizers, but not for derived classes, whose step() may do more.
bool has_recordable_step(const torch::optim::Optimizer& optimizer);

}  // namespace tessera::internal
