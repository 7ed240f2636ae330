#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// In what form a frozen weight is kept.
enum class WeightFormat : uint8_t {
  kFull,  // as it is
  // 4 bit, QLoRA's NormalFloat (Dettmers et al., 2023): blocks of 64 elements, each the nearest of 16 quantiles of the
  // normal distribution times the block's largest absolute value, which is fp32: 4.5 bits an element.
  kNf4,
  // As kNf4, with those values in 8 bit themselves, as bitsandbytes has it (its dynamic map, blocks of 256, less their
  // mean): 4.13 bits an element.
  kNf4Double,
  kInt8,  // blocks of 64 elements: Int8Blocks of core/layout/int8_blocks.h, 8.5 bits an element
};

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

}  // namespace tessera
