#include "core/layout/wire_codec.h"

#include "core/layout/int8_blocks.h"

namespace tessera::internal {
namespace {

// Encodes values by a cast to `dtype`.
class CastCodec final : public WireCodec {
 public:
  CastCodec(at::ScalarType values_dtype, at::ScalarType dtype) : is_identity_(values_dtype == dtype), dtype_(dtype) {}

  bool is_identity() const override { return is_identity_; }
  std::optional<at::ScalarType> sum_dtype() const override { return dtype_; }
  int64_t encoded_bytes(int64_t numel) const override { return numel * static_cast<int64_t>(c10::elementSize(dtype_)); }
  void encode(const at::Tensor& values, const at::Tensor& bytes) const override { bytes.view(dtype_).copy_(values); }
  void decode(const at::Tensor& bytes, const at::Tensor& values) const override { values.copy_(bytes.view(dtype_)); }
  void add(const at::Tensor& bytes, const at::Tensor& values) const override { values.add_(bytes.view(dtype_)); }

 private:
  const bool is_identity_;
  const at::ScalarType dtype_;
};

}  // namespace

std::shared_ptr<const WireCodec> make_wire_codec(WireFormat format, at::ScalarType dtype,
                                                 std::optional<at::ScalarType> cast_to) {
  if (!at::isFloatingType(dtype)) return std::make_shared<CastCodec>(dtype, dtype);
  switch (format) {
    case WireFormat::kInt8Blocks:
      return std::make_shared<Int8Blocks>();
    case WireFormat::kDtype:
      break;
  }
  return std::make_shared<CastCodec>(dtype, cast_to.value_or(dtype));
}

}  // namespace tessera::internal
