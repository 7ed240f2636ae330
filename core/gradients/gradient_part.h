#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::internal {

// Returns a view of `gradient` for a `.grad` on a rank that has only a part of the model's gradients. On such a view,
// torch::nn::utils::clip_grad_norm_ would compute the norm of this rank's part only, and each rank would scale its part
// differently. So after an operator computed a norm of the view, scaling the view in place by a scalar tensor throws
// std::logic_error with `label` ("parameter 'fc.weight' on rank 1"). Other operators behave as on `gradient`.
at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label);

// Whether `gradient` is a view from as_part_of_gradient(), or was detached from such a view.
bool is_part_of_gradient(const at::Tensor& gradient);

// Permits scaling again, after a write of new values or a norm over all ranks. A no-op if not is_part_of_gradient().
void forget_norm(const at::Tensor& gradient);

}  // namespace tessera::internal
