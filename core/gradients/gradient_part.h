#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::internal {

// Returns a view for the `.grad` of a leaf of which other ranks hold the rest. Its norm is the norm of this rank's part
// only. So, after its norm was computed, it throws std::logic_error, naming `label` ("parameter 'fc.weight' on rank
// 1"), if it is scaled in place by a tensor of one number: torch::nn::utils::clip_grad_norm_ would scale each rank's
// part by another factor. Otherwise it is an ordinary tensor.
at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label);

// Must be called when the values are new, or when the norm over all ranks is known. A no-op for other tensors.
void forget_norm(const at::Tensor& gradient);

}  // namespace tessera::internal
