#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <tessera/quantize_linears.h>

namespace tessera::internal {

inline constexpr int64_t kWeightBlockNumel = 64;  // elements that share a scale, in every format

// Returns the bytes of a weight of `numel` elements, scales included. Must not be called for kFull.
int64_t encoded_bytes(WeightFormat format, int64_t numel);

// Encodes a weight of any shape and floating-point dtype, in row order: [encoded_bytes()] uint8, on its device. Throws
// std::invalid_argument for infinite or NaN elements. Is not collective.
at::Tensor encoded(WeightFormat format, const at::Tensor& weight);

// Encodes a deferred weight; the result is deferred, too. If deferred() recorded the weight, must be called inside that
// deferred(). If the weight is read from a source, a rank that needs a part of the bytes reads all of it. Materializing
// the result throws like encoded().
at::Tensor encoded_later(WeightFormat format, const at::Tensor& weight);

// Decodes [encoded_bytes()] uint8 to [numel] of `dtype`, on its device. Rounds once, from fp32; bit-equal everywhere.
at::Tensor decoded(WeightFormat format, const at::Tensor& bytes, int64_t numel, at::ScalarType dtype);

}  // namespace tessera::internal
