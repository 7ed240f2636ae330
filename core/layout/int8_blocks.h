#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <tessera/options/wire_format.h>

namespace tessera::internal {

// Floating-point numbers in 8 bit (ZeRO++, Wang et al., 2023): every block of consecutive elements has a scale in fp32,
// its largest absolute value / 127, and an element is the nearest of -127, ..., 127 times that: off by at most half a
// scale, and the same wherever it is decoded. A block with an infinite or NaN element is NaN throughout, so that checks
// for these find it; what fp32 cannot hold counts as infinite.
//
//   bytes   [encoded_bytes(numel)] uint8: fp32 scales, one a block, then int8 codes; its start is a multiple of 4
//   values  [numel], contiguous, of any floating-point dtype, on the same device
//
// On a CPU in intra-operator threads, elsewhere by torch's operators, to the same bits. Not collective.
class Int8Blocks {
 public:
  static constexpr int64_t kWireBlockNumel = 256;  // 1.6 % of scales

  // block_numel: elements that share a scale.
  explicit constexpr Int8Blocks(int64_t block_numel = kWireBlockNumel) : block_numel_(block_numel) {}

  // A multiple of 16.
  int64_t encoded_bytes(int64_t numel) const;
  void encode(const at::Tensor& values, const at::Tensor& bytes) const;  // into `bytes`
  void decode(const at::Tensor& bytes, const at::Tensor& values) const;  // into `values`
  // values += what `bytes` says; of fp32.
  void add(const at::Tensor& bytes, const at::Tensor& values) const;

 private:
  void read(const at::Tensor& bytes, const at::Tensor& values, bool adds) const;
  int64_t blocks(int64_t numel) const { return (numel + block_numel_ - 1) / block_numel_; }
  at::Tensor scales_in(const at::Tensor& bytes, int64_t numel) const;
  at::Tensor codes_in(const at::Tensor& bytes, int64_t numel) const;

  int64_t block_numel_;
};

}  // namespace tessera::internal
