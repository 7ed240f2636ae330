#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::internal {

// Returns a view for the `.grad` of a leaf of which other ranks hold the rest. Its norm is that of this rank's part
// only, by which torch::nn::utils::clip_grad_norm_ would scale each part differently. So once its norm was computed,
// scaling it in place by a tensor of one number throws std::logic_error, naming `label` ("parameter 'fc.weight' on rank
// 1"). Otherwise it is an ordinary tensor.
at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label);

// Whether `gradient`, or the tensor that it was detached from, is a result of as_part_of_gradient().
bool is_part_of_gradient(const at::Tensor& gradient);

// Must be called when the values are new, or when the norm over all ranks is known. A no-op for other tensors.
void forget_norm(const at::Tensor& gradient);

}  // namespace tessera::internal
