#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// Storage format of a frozen weight.
enum class WeightFormat : uint8_t {
  kFull,  // unchanged
  // 4 bit, QLoRA's NormalFloat (Dettmers et al., 2023): blocks of 64 elements. Each element is the nearest of 16
  // quantiles of the normal distribution, times the block's largest absolute value in fp32: 4.5 bits an element.
  kNf4,
  // As kNf4, with these scales in 8 bit like bitsandbytes (dynamic map, blocks of 256, minus their mean): 4.13 bits an
  // element.
  kNf4Double,
  kInt8,  // blocks of 64 elements: Int8Blocks of core/layout/int8_blocks.h, 8.5 bits an element
};

inline constexpr int64_t kWeightBlockNumel = 64;  // elements that share a scale, in every format

// Returns the bytes of a weight of `numel` elements, scales included. Must not be called for kFull.
int64_t encoded_bytes(WeightFormat format, int64_t numel);

// Encodes a weight of any shape and floating-point dtype, in row order: [encoded_bytes()] uint8, on its device. Throws
// std::invalid_argument for infinite or NaN elements. Is not collective.
at::Tensor encoded(WeightFormat format, const at::Tensor& weight);

// Encodes a deferred weight; the result is deferred, too. If deferred() recorded the weight, must be called inside that
// deferred(). If the weight is read from a source, a rank that needs a part of the bytes reads all of it. Materializing
// the result throws as encoded() does.
at::Tensor encoded_later(WeightFormat format, const at::Tensor& weight);

// Decodes [encoded_bytes()] uint8 to [numel] of `dtype`, on its device. Rounds once, from fp32; bit-equal everywhere.
at::Tensor decoded(WeightFormat format, const at::Tensor& bytes, int64_t numel, at::ScalarType dtype);

}  // namespace tessera
