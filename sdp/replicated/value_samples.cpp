#include "sdp/replicated/value_samples.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "core/runtime/bits_dtype.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {
namespace {

constexpr int kNumberBits = 42;
constexpr int64_t kNumberMask = (int64_t{1} << kNumberBits) - 1;

int64_t place_in(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense() ? tensor.numel() / 2 : 0; }

uint64_t on_host(const at::Tensor& tensor) {
  uint64_t sample = 0;
  if (tensor.numel() == 0) return sample;
  const auto* values = static_cast<const char*>(tensor.const_data_ptr());
  std::memcpy(&sample, values + place_in(tensor) * tensor.element_size(),
              std::min<size_t>(sizeof(sample), tensor.element_size()));
  return sample;
}

// [1], the parameter's memory; of a complex number the real part, which is nowhere kept alone.
at::Tensor on_device(const at::Tensor& parameter) {
  if (parameter.numel() == 0)
    return at::zeros({1}, parameter.options().dtype(at::toRealValueType(parameter.scalar_type())).requires_grad(false));
  const at::Tensor tensor = parameter.detach();
  const at::Tensor value = tensor.as_strided({1}, {1}, tensor.storage_offset() + place_in(tensor));
  return value.is_complex() ? at::view_as_real(value).select(1, 0) : value;
}

}  // namespace

ValueSamples ValueSamples::of(const std::vector<PlannedParameter>& parameters) {
  ValueSamples samples;
  if (parameters.empty()) return samples;
  if (parameters[0].tensor.is_cpu()) {
    for (const PlannedParameter& parameter : parameters) samples.on_host_.push_back(on_host(parameter.tensor));
    return samples;
  }
  std::vector<at::Tensor> values;
  for (const PlannedParameter& parameter : parameters) values.push_back(on_device(parameter.tensor));
  const auto dtype = values[0].scalar_type();
  if (std::ranges::all_of(values, [&](const at::Tensor& value) { return value.scalar_type() == dtype; })) {
    samples.on_device_ = at::cat(values).view(bits_dtype(values[0].element_size())).to(at::kLong);
  } else {
    for (at::Tensor& value : values) value = value.view(bits_dtype(value.element_size())).to(at::kLong);
    samples.on_device_ = at::cat(values);
  }
  return samples;
}

at::Tensor ValueSamples::any_differs_from(const ValueSamples& other) const {
  other.on_device_.record_stream(current_stream(on_device_.device()));  // it may be let go of next
  return on_device_.ne(other.on_device_).any().view({1}).to(at::kLong);
}

at::Tensor ValueSamples::where_other_than(const ValueSamples& other) const {
  other.on_device_.record_stream(current_stream(on_device_.device()));
  const at::Tensor folded = on_device_.bitwise_xor(on_device_.bitwise_right_shift(64 - kNumberBits));
  return folded.bitwise_and_(kNumberMask).add_(1).mul_(on_device_.ne(other.on_device_));
}

}  // namespace tessera::internal
