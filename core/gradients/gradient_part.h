#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::internal {

// Returns a view of `gradient` for the `.grad` of a leaf of which other ranks hold the rest. On such a view,
// torch::nn::utils::clip_grad_norm_ would compute the norm of this rank's part only, and scale each part differently.
// So after a norm of the view was computed, scaling the view in place by a tensor [] throws std::logic_error, naming
// `label` ("parameter 'fc.weight' on rank 1"). Other operators behave as on `gradient`.
at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label);

// Whether `gradient` is a result of as_part_of_gradient(), or was detached from one.
bool is_part_of_gradient(const at::Tensor& gradient);

// Permits scaling again: the gradient has new values, or its norm over all ranks is known. A no-op on other tensors.
void forget_norm(const at::Tensor& gradient);

}  // namespace tessera::internal
