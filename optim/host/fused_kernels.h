#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

namespace tessera::internal {

// Returns whether libtorch's _fused_sgd_ is correct for parameters of this dtype and device, in every supported version
// of libtorch. On CPUs, versions before the fix of pytorch#191763 skip full vectors of 16-bit parameters, and read
// momenta as fp32. _fused_adam_ and _fused_adamw_ are correct for all dtypes (tests/optim/fused_kernels_test.cpp).
constexpr bool fused_sgd_is_right(at::ScalarType dtype, at::DeviceType device) {
  return device != at::kCPU || (dtype != at::kBFloat16 && dtype != at::kHalf);
}

// Returns the learning rate for a fused kernel. On a device, rounds it to fp32 unless the parameter is fp64. Eager
// steps then use the same rate as recorded steps (CapturedStep), whose kernels read the rate in fp32.
inline double rate_of_kernels(double lr, const at::Tensor& parameter) {
  return parameter.is_cpu() || parameter.scalar_type() == at::kDouble ? lr : static_cast<float>(lr);
}

// Returns whether CapturedStep can record the optimizer's step(), which then calls CapturedWork::add_step(). True for
// fused optimizers, but false for classes derived from them, because their step() may do other work.
bool has_recordable_step(const torch::optim::Optimizer& optimizer);

}  // namespace tessera::internal
