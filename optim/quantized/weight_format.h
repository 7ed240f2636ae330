#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <tessera/quantize_linears.h>

namespace tessera::internal {

inline constexpr int64_t kWeightBlockNumel = 64;  // elements that share a scale, in every format

// The bytes of a weight of `numel` elements, scales included. Not for kFull. Pure.
int64_t encoded_bytes(WeightFormat format, int64_t numel);

// A weight of any shape and floating-point dtype, in the order of its rows -> [encoded_bytes()] uint8, on its device.
// Throws std::invalid_argument for elements that are infinite or NaN. Not collective, as decoding.
at::Tensor encoded(WeightFormat format, const at::Tensor& weight);

// The same of a deferred weight, deferred itself. One that deferred() has written down: inside that deferred() alone.
// Of one that is read from somewhere, a rank that needs a part of the bytes reads all of the weight. Throws when the
// values are there what encoded() does.
at::Tensor encoded_later(WeightFormat format, const at::Tensor& weight);

// [encoded_bytes()] uint8 -> [numel] of `dtype`, on the same device. Rounds once, from fp32; the same bits everywhere.
at::Tensor decoded(WeightFormat format, const at::Tensor& bytes, int64_t numel, at::ScalarType dtype);

}  // namespace tessera::internal
