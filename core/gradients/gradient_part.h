#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::internal {

// A view of the same memory for the `.grad` of a leaf of which other ranks hold the rest, so that its norm is this
// rank's alone. It is an ordinary tensor, but scaling it in place by a tensor of one number after its norm was taken
// throws std::logic_error that names `label` ("parameter 'fc.weight' on rank 1"). torch::nn::utils::clip_grad_norm_
// does that, and would scale each rank's part by another factor.
at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label);

// Call it when the values are new, or when the norm of all ranks' parts is known. A no-op for other tensors.
void forget_norm(const at::Tensor& gradient);

}  // namespace tessera::internal
