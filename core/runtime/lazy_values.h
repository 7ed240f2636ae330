#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::internal {

// Returns whether operators see values that differ from the memory: a conjugate or negative bit is set, or the tensor
// is zeros without memory. clone() materializes the values.
inline bool has_lazy_values(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor();
}

}  // namespace tessera::internal
