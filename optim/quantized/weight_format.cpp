#include "optim/quantized/weight_format.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <tessera/optim/adamw_8bit.h>
#include "core/layout/deferred.h"
#include "core/layout/int8_blocks.h"
#include "core/memory/without_data.h"
#include "core/runtime/parallel_over.h"

namespace tessera::internal {
namespace {

// bitsandbytes' table: quantiles of the normal distribution, scaled to [-1, 1], with an exact 0.
constexpr std::array<float, 16> kNormalFloats{
    -1.0F,
    -0.6961928009986877F,
    -0.5250730514526367F,
    -0.39491748809814453F,
    -0.28444138169288635F,
    -0.18477343022823334F,
    -0.09105003625154495F,
    0.0F,
    0.07958029955625534F,
    0.16093020141124725F,
    0.24611230194568634F,
    0.33791524171829224F,
    0.44070982933044434F,
    0.5626170039176941F,
    0.7229568362236023F,
    1.0F,
};
constexpr int64_t kScaleBlockNumel = 256;
constexpr int64_t kGrainRows = 256;
const Int8Blocks kInt8Weights{kWeightBlockNumel};

int64_t blocks_of(int64_t numel, int64_t block_numel) { return (numel + block_numel - 1) / block_numel; }
int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Byte offsets in an encoded 4-bit weight.
struct Nf4Layout {
  Nf4Layout(WeightFormat format, int64_t numel)
      : is_double(format == WeightFormat::kNf4Double),
        blocks(blocks_of(numel, kWeightBlockNumel)),
        scales_at(aligned(blocks * kWeightBlockNumel / 2)),
        outer_at(scales_at + aligned(is_double ? blocks : 4 * blocks)),
        end(is_double ? outer_at + aligned(4 * (blocks_of(blocks, kScaleBlockNumel) + 1)) : outer_at) {}

  const bool is_double;
  const int64_t blocks;
  const int64_t scales_at;  // offset of the scales: fp32, or indices into dynamic_map() if is_double
  const int64_t outer_at;   // if is_double, offset of fp32 numbers: the mean scale, and one scale for each 256 scales
  const int64_t end;

  at::Tensor codes(const at::Tensor& bytes) const { return bytes.narrow(0, 0, blocks * kWeightBlockNumel / 2); }
  at::Tensor inner(const at::Tensor& bytes) const {
    return bytes.narrow(0, scales_at, is_double ? blocks : 4 * blocks);
  }
  at::Tensor outer(const at::Tensor& bytes) const {
    return bytes.narrow(0, outer_at, 4 * (blocks_of(blocks, kScaleBlockNumel) + 1)).view(at::kFloat);
  }
};

// Divides each row by its largest absolute value, and writes these values to `scales`, [rows]. Zero rows stay zero.
at::Tensor scaled_rows(const at::Tensor& rows, const at::Tensor& scales) {
  scales.copy_(rows.abs().amax(1));
  return rows / at::where(scales > 0, scales, 1.0).unsqueeze(1);
}

// Returns the indices of the nearest values in an ascending table. In a tie, returns the lower index.
at::Tensor nearest(const at::Tensor& values, const at::Tensor& table) {
  const int64_t last = table.numel() - 1;
  const at::Tensor between = (table.narrow(0, 0, last) + table.narrow(0, 1, last)) / 2;
  return at::bucketize(values, between).to(at::kByte);
}

at::Tensor normal_floats(at::Device device) {
  return at::tensor(at::ArrayRef<float>(kNormalFloats), at::kCPU).to(device);
}

void encode_scales(const Nf4Layout& layout, const at::Tensor& scales, const at::Tensor& bytes) {
  if (!layout.is_double) return static_cast<void>(layout.inner(bytes).view(at::kFloat).copy_(scales));
  const at::Tensor outer = layout.outer(bytes), mean = scales.mean();
  outer.narrow(0, 0, 1).copy_(mean);
  const at::Tensor rows = scaled_rows(in_rows(scales - mean, kScaleBlockNumel), outer.narrow(0, 1, outer.numel() - 1));
  layout.inner(bytes).copy_(nearest(rows, dynamic_map(true).to(bytes.device())).view({-1}).narrow(0, 0, layout.blocks));
}

// Returns the scale of each block: [blocks], fp32.
at::Tensor decoded_scales(const Nf4Layout& layout, const at::Tensor& bytes) {
  if (!layout.is_double) return layout.inner(bytes).view(at::kFloat);
  const at::Tensor outer = layout.outer(bytes);
  const at::Tensor rows =
      in_rows(dynamic_map(true).to(bytes.device()).index_select(0, layout.inner(bytes).to(at::kInt)), kScaleBlockNumel);
  return rows.mul(outer.narrow(0, 1, outer.numel() - 1).unsqueeze(1))
      .add_(outer.narrow(0, 0, 1))
      .view({-1})
      .narrow(0, 0, layout.blocks);
}

// Returns the decoded elements, [numel] fp32. Each byte of `codes` holds two elements, the first in its high bits.
at::Tensor decoded_codes(const at::Tensor& codes, const at::Tensor& scales, int64_t numel) {
  if (!codes.is_cpu()) {
    const at::Tensor both = at::stack({codes.bitwise_right_shift(4), codes.bitwise_and(15)}, 1).view({-1});
    return normal_floats(codes.device())
        .index_select(0, both.to(at::kInt))
        .view({-1, kWeightBlockNumel})
        .mul_(scales.unsqueeze(1))
        .view({-1})
        .narrow(0, 0, numel);
  }
  at::Tensor values = at::empty({codes.numel() * 2}, codes.options().dtype(at::kFloat));
  const auto* from = codes.const_data_ptr<uint8_t>();
  const auto* of_blocks = scales.const_data_ptr<float>();
  auto* to = values.mutable_data_ptr<float>();
  parallel_over(0, is_without_data() ? 0 : scales.numel(), kGrainRows, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      std::array<float, 16> table;
      for (size_t i = 0; i < table.size(); ++i) table[i] = kNormalFloats[i] * of_blocks[block];
      for (int64_t i = block * kWeightBlockNumel / 2; i < (block + 1) * kWeightBlockNumel / 2; ++i) {
        to[2 * i] = table[from[i] >> 4];
        to[2 * i + 1] = table[from[i] & 15];
      }
    }
  });
  return values.narrow(0, 0, numel);
}

}  // namespace

int64_t encoded_bytes(WeightFormat format, int64_t numel) {
  return format == WeightFormat::kInt8 ? kInt8Weights.encoded_bytes(numel) : Nf4Layout(format, numel).end;
}

at::Tensor encoded(WeightFormat format, const at::Tensor& weight) {
  at::NoGradGuard no_grad;
  const at::Tensor values = weight.detach().contiguous().view({-1}).to(at::kFloat);
  if (!at::isfinite(values).all().item<bool>() && !is_without_data())
    throw std::invalid_argument("a weight to be quantized has elements that are infinite or NaN");
  at::Tensor bytes = at::zeros({encoded_bytes(format, values.numel())}, values.options().dtype(at::kByte));
  if (values.numel() == 0) return bytes;
  if (format == WeightFormat::kInt8) {
    kInt8Weights.encode(values, bytes);
    return bytes;
  }
  const Nf4Layout layout(format, values.numel());
  at::Tensor scales = at::empty({layout.blocks}, values.options());
  at::Tensor rows = in_rows(values, kWeightBlockNumel);
  scales.copy_(rows.abs().amax(1));
  encode_scales(layout, scales, bytes);
  const at::Tensor places = nearest(scaled_rows(rows, scales), normal_floats(values.device())).view({-1, 2});
  layout.codes(bytes).copy_(places.select(1, 0).bitwise_left_shift(4).bitwise_or_(places.select(1, 1)));
  return bytes;
}

// Encodes a weight as a single operator, which deferred() can record and replay.
static at::Tensor encode_weight(const at::Tensor& weight, int64_t format) {
  const auto as = static_cast<WeightFormat>(format);
  if (weight.is_meta()) return at::empty({encoded_bytes(as, weight.numel())}, weight.options().dtype(at::kByte));
  return encoded(as, weight);
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("encode_weight(Tensor weight, int format) -> Tensor",
              torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(encode_weight)));
}

at::Tensor encoded_later(WeightFormat format, const at::Tensor& weight) {
  at::NoGradGuard no_grad;
  const ReadElements* read = reader_of(weight);
  if (read == nullptr) {
    static const auto encode = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("tessera::encode_weight", "")
                                   .typed<at::Tensor(const at::Tensor&, int64_t)>();
    return encode.call(weight, static_cast<int64_t>(format));
  }
  auto read_part = [=, read = *read, sizes = weight.sizes().vec(), strides = weight.strides().vec(),
                    dtype = weight.scalar_type()](Range bytes, void* target) {
    const at::NoGradGuard on_its_thread;
    const OrdinaryScope ordinary;
    const at::Tensor whole = at::empty_strided(sizes, strides, at::TensorOptions(at::kCPU).dtype(dtype));
    read({0, whole.numel()}, whole.mutable_data_ptr());
    std::memcpy(target, encoded(format, whole).const_data_ptr<uint8_t>() + bytes.begin,
                static_cast<size_t>(bytes.numel()));
  };
  return deferred_from({encoded_bytes(format, weight.numel())}, {1}, at::kByte, device_of_values(weight),
                       std::move(read_part));
}

at::Tensor decoded(WeightFormat format, const at::Tensor& bytes, int64_t numel, at::ScalarType dtype) {
  if (bytes.numel() != encoded_bytes(format, numel) || bytes.scalar_type() != at::kByte)
    throw std::invalid_argument(c10::str("a quantized weight of ", numel, " elements in ", bytes.numel(),
                                         " elements of ", bytes.scalar_type(), ", expected ",
                                         encoded_bytes(format, numel), " of Byte: it was converted, or is another's"));
  if (numel == 0) return at::empty({0}, bytes.options().dtype(dtype));
  if (format == WeightFormat::kInt8) {
    at::Tensor values = at::empty({numel}, bytes.options().dtype(at::kFloat));
    kInt8Weights.decode(bytes, values);
    return values.to(dtype);
  }
  const Nf4Layout layout(format, numel);
  return decoded_codes(layout.codes(bytes), decoded_scales(layout, bytes), numel).to(dtype);
}

}  // namespace tessera::internal
