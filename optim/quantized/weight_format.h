#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <tessera/quantize_linears.h>

namespace tessera::internal {

inline constexpr int64_t kWeightBlockNumel = 64;  // elements that share a scale, in every format

// Returns the number of bytes of an encoded weight with `numel` elements, scales included. `format` must not be kFull.
int64_t encoded_bytes(WeightFormat format, int64_t numel);

// Encodes a weight of any shape and floating-point dtype, in row-major order. Returns [encoded_bytes()] uint8 on the
// weight's device. Throws std::invalid_argument for infinite or NaN elements. Not collective.
at::Tensor encoded(WeightFormat format, const at::Tensor& weight);

// Encodes a deferred weight. The result is also deferred. If deferred() recorded the weight, must be called inside the
// same deferred(). If the weight has a reader (reader_of()), a rank that needs a part of the bytes reads and encodes
// the whole weight. Materializing the result throws std::invalid_argument for infinite or NaN elements.
at::Tensor encoded_later(WeightFormat format, const at::Tensor& weight);

// Decodes `bytes`, [encoded_bytes()] uint8, to [numel] of `dtype`, through fp32. Bit-equal on all devices. Throws
// std::invalid_argument if `bytes` has another size or dtype.
at::Tensor decoded(WeightFormat format, const at::Tensor& bytes, int64_t numel, at::ScalarType dtype);

}  // namespace tessera::internal
