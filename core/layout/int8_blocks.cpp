#include "core/layout/int8_blocks.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "core/memory/without_data.h"
#include "core/runtime/parallel_over.h"

namespace tessera::internal {
namespace {

constexpr int64_t kLevels = 127;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int64_t kGrainBlocks = 128;
// With a smaller (subnormal, inexact) scale, value / scale may exceed 8 bits. Such a block's codes are all zero.
constexpr float kSmallestScale = std::numeric_limits<float>::min();

// Compares absolute values as integers, because that loop vectorizes. As an integer, a NaN exceeds infinity.
float scale_of(const float* values, int64_t numel) {
  int32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) largest = std::max(largest, std::bit_cast<int32_t>(values[i]) & 0x7fffffff);
  if (largest >= kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(largest) / kLevels;
}

void encode_block(const float* values, int64_t numel, float& scale, int8_t* codes) {
  scale = scale_of(values, numel);
  if (!(scale >= kSmallestScale)) return static_cast<void>(std::fill_n(codes, numel, int8_t{0}));
  // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even. The low bits of the sum then hold the integer.
  constexpr float kRounds = 12582912.0F;
  for (int64_t i = 0; i < numel; ++i)
    codes[i] =
        static_cast<int8_t>(std::bit_cast<int32_t>(values[i] / scale + kRounds) - std::bit_cast<int32_t>(kRounds));
}

}  // namespace

at::Tensor in_rows(const at::Tensor& flat, int64_t block_numel) {
  const int64_t rest = flat.numel() % block_numel;
  return (rest == 0 ? flat : at::constant_pad_nd(flat, {0, block_numel - rest})).view({-1, block_numel});
}

int64_t Int8Blocks::encoded_bytes(int64_t numel) const {
  constexpr int64_t kAlignment = 16;
  return (blocks(numel) * static_cast<int64_t>(sizeof(float)) + numel + kAlignment - 1) / kAlignment * kAlignment;
}

at::Tensor Int8Blocks::scales_in(const at::Tensor& bytes, int64_t numel) const {
  return bytes.narrow(0, 0, blocks(numel) * static_cast<int64_t>(sizeof(float))).view(at::kFloat);
}

at::Tensor Int8Blocks::codes_in(const at::Tensor& bytes, int64_t numel) const {
  return bytes.narrow(0, blocks(numel) * static_cast<int64_t>(sizeof(float)), numel).view(at::kChar);
}

void Int8Blocks::encode(const at::Tensor& values, const at::Tensor& bytes) const {
  const int64_t numel = values.numel();
  if (numel == 0) return;
  const at::Tensor floats = values.to(at::kFloat), scales = scales_in(bytes, numel), codes = codes_in(bytes, numel);
  if (!values.is_cpu()) {
    const at::Tensor rows = in_rows(floats, block_numel_);
    const at::Tensor largest = rows.abs().amax(1, /*keepdim=*/true);
    const at::Tensor scale = (largest + (largest - largest)) / kLevels;  // NaN if `largest` is infinite
    scales.copy_(scale.view({-1}));
    const at::Tensor rounded = at::where(scale >= kSmallestScale, (rows / scale).round_(), 0.0);
    codes.copy_(rounded.view({-1}).narrow(0, 0, numel));
    return;
  }
  const auto* from = floats.const_data_ptr<float>();
  auto* to_scales = scales.mutable_data_ptr<float>();
  auto* to_codes = codes.mutable_data_ptr<int8_t>();
  parallel_over(0, is_without_data() ? 0 : blocks(numel), kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * block_numel_;
      encode_block(from + first, std::min(block_numel_, numel - first), to_scales[block], to_codes + first);
    }
  });
}

void Int8Blocks::decode(const at::Tensor& bytes, const at::Tensor& values) const {
  read(bytes, values, /*adds=*/false);
}

void Int8Blocks::add(const at::Tensor& bytes, const at::Tensor& values) const { read(bytes, values, /*adds=*/true); }

void Int8Blocks::read(const at::Tensor& bytes, const at::Tensor& values, bool adds) const {
  const int64_t numel = values.numel();
  if (numel == 0) return;
  const at::Tensor scales = scales_in(bytes, numel), codes = codes_in(bytes, numel);
  if (!values.is_cpu()) {
    const at::Tensor rows = in_rows(codes.to(at::kFloat), block_numel_).mul(scales.unsqueeze(1));
    const at::Tensor decoded = rows.view({-1}).narrow(0, 0, numel);
    adds ? values.add_(decoded) : values.copy_(decoded);
    return;
  }
  const bool is_float = values.scalar_type() == at::kFloat;
  const at::Tensor floats = is_float ? values : at::empty(values.sizes(), values.options().dtype(at::kFloat));
  const auto* from_scales = scales.const_data_ptr<float>();
  const auto* from_codes = codes.const_data_ptr<int8_t>();
  auto* to = floats.mutable_data_ptr<float>();
  parallel_over(0, is_without_data() ? 0 : blocks(numel), kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t last = std::min((block + 1) * block_numel_, numel);
      const float scale = from_scales[block];
      for (int64_t i = block * block_numel_; i < last; ++i) {
        const float value = scale * static_cast<float>(from_codes[i]);
        to[i] = adds ? to[i] + value : value;
      }
    }
  });
  if (!is_float) values.copy_(floats);
}

}  // namespace tessera::internal
