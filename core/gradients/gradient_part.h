#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::internal {

// A view of the same memory for `.grad` of a leaf of which other ranks hold the rest (or for the gradient of a
// parameter that only its owner has). It is an ordinary tensor, with one habit: a norm of it is this rank's alone, so
// multiplying it in place by a tensor of one number, after its norm was taken and without a collective of this thread
// in between, throws std::logic_error that names `label` ("parameter 'fc.weight' on rank 1"). That is what
// torch::nn::utils::clip_grad_norm_ does, which would scale each rank's part by another factor. And one of what cat()
// makes of several: an inner product (dot) with it throws likewise, since that is what torch::optim::LBFGS steps by.
at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label);

// New values are in it: norms of the old ones say nothing any more. Does nothing to other tensors.
void forget_norm(const at::Tensor& gradient);

}  // namespace tessera::internal
