#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::internal {

// Whether operators see other values than its memory has: conjugates or negatives of them, or zeros without any memory.
// A clone has them as they are.
inline bool has_lazy_values(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor();
}

}  // namespace tessera::internal
