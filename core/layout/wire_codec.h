#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include <tessera/options/wire_format.h>

namespace tessera::internal {

// Encodes the values that ranks send each other. All-gathers and reductions use the same codecs. Thread-safe.
//
//   bytes   [encoded_bytes(numel)] uint8, on the device of the values
//   values  [numel], contiguous, of any floating-point dtype
class WireCodec {
 public:
  virtual ~WireCodec() = default;

  // Returns whether the encoded bytes equal the values. If true, a caller may send values without encoding them.
  virtual bool is_identity() const { return false; }
  // Returns the dtype of encoded values if a collective can sum them. Otherwise returns nullopt: ranks exchange encoded
  // parts, and the receiver sums the parts with add().
  virtual std::optional<at::ScalarType> sum_dtype() const { return std::nullopt; }

  virtual int64_t encoded_bytes(int64_t numel) const = 0;
  virtual void encode(const at::Tensor& values, const at::Tensor& bytes) const = 0;
  // Decodes `bytes` into `values`, with equal results on all ranks.
  virtual void decode(const at::Tensor& bytes, const at::Tensor& values) const = 0;
  // Adds the decoded `bytes` to `values`, which must be fp32.
  virtual void add(const at::Tensor& bytes, const at::Tensor& values) const = 0;
};

// Returns the codec of a format for values of `dtype`. Values that are not floating-point are sent unchanged. `cast_to`
// is the dtype in which WireFormat::kDtype sends values; nullopt: their own dtype.
std::shared_ptr<const WireCodec> make_wire_codec(WireFormat format, at::ScalarType dtype,
                                                 std::optional<at::ScalarType> cast_to = {});

}  // namespace tessera::internal
