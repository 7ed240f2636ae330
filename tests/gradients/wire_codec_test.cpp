// Every wire format decodes to values near the encoded ones, and adds them.
#include "core/layout/wire_codec.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/layout/int8_blocks.h"

namespace tessera::wire_codec_test {
using namespace internal;
namespace {

using Codec = std::shared_ptr<const WireCodec>;

at::Tensor encoded(const WireCodec& codec, const at::Tensor& values) {
  at::Tensor bytes = torch::empty({codec.encoded_bytes(values.numel())}, at::kByte);
  codec.encode(values, bytes);
  return bytes;
}

TEST(WireCodec, DecodesAndAddsWithinItsPrecision) {
  const at::Tensor values = torch::linspace(-3, 5, 1000);
  for (const Codec& codec :
       {make_wire_codec(WireFormat::kDtype, at::kFloat), make_wire_codec(WireFormat::kDtype, at::kFloat, at::kBFloat16),
        make_wire_codec(WireFormat::kInt8Blocks, at::kFloat)}) {
    const at::Tensor bytes = encoded(*codec, values);
    at::Tensor decoded = torch::empty_like(values), sum = torch::ones_like(values);
    codec->decode(bytes, decoded);
    codec->add(bytes, sum);
    EXPECT_LE((decoded - values).abs().max().item<double>(), 5.0 / 127);
    EXPECT_TRUE(torch::equal(sum, 1 + decoded));
  }
}

TEST(WireCodec, SaysWhetherACollectiveCanSum) {
  EXPECT_EQ(make_wire_codec(WireFormat::kDtype, at::kFloat, at::kHalf)->sum_dtype(), at::kHalf);
  EXPECT_EQ(make_wire_codec(WireFormat::kInt8Blocks, at::kFloat)->sum_dtype(), std::nullopt);
}

TEST(WireCodec, IsTheIdentityWhereNothingIsToBeEncoded) {
  EXPECT_TRUE(make_wire_codec(WireFormat::kDtype, at::kFloat)->is_identity());
  EXPECT_TRUE(make_wire_codec(WireFormat::kDtype, at::kHalf, at::kHalf)->is_identity());
  EXPECT_TRUE(make_wire_codec(WireFormat::kInt8Blocks, at::kLong)->is_identity());
  EXPECT_TRUE(make_wire_codec(WireFormat::kDtype, at::kComplexFloat, at::kHalf)->is_identity());
  EXPECT_FALSE(make_wire_codec(WireFormat::kDtype, at::kFloat, at::kHalf)->is_identity());
}

}  // namespace
}  // namespace tessera::wire_codec_test
