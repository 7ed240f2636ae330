#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// Marks a leaf tensor as a wrapper's part of a parameter, so that code which expects whole
// parameters can refuse it. The mark stays with the TensorImpl.
void mark_as_shard(const at::Tensor& tensor);
bool is_shard(const at::Tensor& tensor);

}  // namespace tessera
