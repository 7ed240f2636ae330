#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/layout/wire_codec.h"

namespace tessera::internal {

// Encodes floating-point numbers in 8 bits (ZeRO++, Wang et al., 2023). Every block of consecutive elements has an fp32
// scale: its largest absolute value / 127. An element is encoded as the nearest of -127, ..., 127 times the scale, with
// an error of at most half a scale. Decoding computes the same bits on all devices. A block with a subnormal scale
// decodes to zeros. A block with an infinite or NaN element decodes to NaN, so that later checks find it. Values beyond
// the range of fp32 count as infinite.
//
// The encoded bytes are one fp32 scale for each block, then the int8 codes. The address of `bytes` must be a multiple
// of 4. CPUs encode on intra-operator threads, other devices by torch operators, whose scales may differ in a last bit.
class Int8Blocks final : public WireCodec {
 public:
  static constexpr int64_t kWireBlockNumel = 256;  // the scales add 1.6 % to the bytes

  // `block_numel` is the number of elements that share a scale.
  explicit Int8Blocks(int64_t block_numel = kWireBlockNumel) : block_numel_(block_numel) {}

  int64_t encoded_bytes(int64_t numel) const override;  // a multiple of 16
  void encode(const at::Tensor& values, const at::Tensor& bytes) const override;
  void decode(const at::Tensor& bytes, const at::Tensor& values) const override;
  void add(const at::Tensor& bytes, const at::Tensor& values) const override;

 private:
  void read(const at::Tensor& bytes, const at::Tensor& values, bool adds) const;
  int64_t blocks(int64_t numel) const { return (numel + block_numel_ - 1) / block_numel_; }
  at::Tensor scales_in(const at::Tensor& bytes, int64_t numel) const;
  at::Tensor codes_in(const at::Tensor& bytes, int64_t numel) const;

  int64_t block_numel_;
};

// Returns the elements of `flat` as [blocks, block_numel]. Pads the last block with zeros.
at::Tensor in_rows(const at::Tensor& flat, int64_t block_numel);

}  // namespace tessera::internal
