#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace tessera::internal {

// Returns the integer dtype of `element_bytes` (1, 2, 4 or 8) bytes, to compare values of other dtypes bit by bit.
inline at::ScalarType bits_dtype(int64_t element_bytes) {
  return element_bytes == 1 ? at::kByte : element_bytes == 2 ? at::kShort : element_bytes == 4 ? at::kInt : at::kLong;
}

// Returns whether operators and collectives compute in this dtype. at::isFloatingType() also returns true for float8
// and float4, which libtorch only stores and converts.
inline bool is_training_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
}

// Throws std::invalid_argument, naming `option`, if `dtype` is set and is not a training dtype.
inline void require_training_dtype(const std::string& option, std::optional<at::ScalarType> dtype) {
  if (!dtype || is_training_dtype(*dtype)) return;
  throw std::invalid_argument(option + " is " + c10::toString(*dtype) + ", expected Half, BFloat16, Float or Double");
}

}  // namespace tessera::internal
