#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>

namespace tessera::internal {

// Returns the integer dtype of `element_bytes` (1, 2, 4 or 8) bytes, to compare values of other dtypes bit by bit.
inline at::ScalarType bits_dtype(int64_t element_bytes) {
  return element_bytes == 1 ? at::kByte : element_bytes == 2 ? at::kShort : element_bytes == 4 ? at::kInt : at::kLong;
}

}  // namespace tessera::internal
