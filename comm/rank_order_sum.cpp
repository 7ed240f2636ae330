#include "tessera/comm/rank_order_sum.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <algorithm>

#include "tessera/async/parallel_over.h"

namespace tessera {
namespace {

constexpr int64_t kBlockNumel = 1024;     // of accumulators: stays in the first-level cache
constexpr int64_t kGrainNumel = 1 << 16;  // below this a second thread costs more than it brings

// min and max keep NaN, as torch's do, whichever side it is on.
template <class Accumulator>
void combine(Accumulator& into, Accumulator value, ReduceOp op) {
  const bool take = op == ReduceOp::kMax ? value > into : value < into;
  if (take || value != value) into = value;
}

template <class Scalar>
void reduce_range(Scalar* out, const std::vector<const Scalar*>& parts, ReduceOp op, int64_t begin, int64_t end) {
  using Accumulator = at::opmath_type<Scalar>;
  const auto divisor = static_cast<Accumulator>(parts.size());
  Accumulator sum[kBlockNumel];
  for (int64_t block = begin; block < end; block += kBlockNumel) {
    const int64_t numel = std::min(kBlockNumel, end - block);
    for (int64_t i = 0; i < numel; ++i) sum[i] = static_cast<Accumulator>(parts[0][block + i]);
    for (size_t part = 1; part < parts.size(); ++part) {
      const Scalar* values = parts[part] + block;
      if (op == ReduceOp::kSum || op == ReduceOp::kAverage) {
        for (int64_t i = 0; i < numel; ++i) sum[i] += static_cast<Accumulator>(values[i]);
      } else {
        for (int64_t i = 0; i < numel; ++i) combine(sum[i], static_cast<Accumulator>(values[i]), op);
      }
    }
    if (op == ReduceOp::kAverage)
      for (int64_t i = 0; i < numel; ++i) sum[i] /= divisor;
    for (int64_t i = 0; i < numel; ++i) out[block + i] = static_cast<Scalar>(sum[i]);
  }
}

// over(numel, body) calls body(begin, end) for all of them.
template <class Over>
void reduce_over(void* out, const std::vector<const void*>& parts, at::ScalarType dtype, ReduceOp op, Over over) {
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "reduce_in_rank_order", [&] {
    std::vector<const scalar_t*> values;
    for (const void* part : parts) values.push_back(static_cast<const scalar_t*>(part));
    auto* result = static_cast<scalar_t*>(out);
    over([&](int64_t begin, int64_t end) { reduce_range(result, values, op, begin, end); });
  });
}

std::vector<const void*> places_of(const std::vector<at::Tensor>& parts) {
  std::vector<const void*> places;
  for (const at::Tensor& part : parts) places.push_back(part.const_data_ptr());
  return places;
}

}  // namespace

void reduce_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op) {
  reduce_in_rank_order(out.mutable_data_ptr(), places_of(parts), out.numel(), out.scalar_type(), op);
}

void reduce_in_rank_order(void* out, const std::vector<const void*>& parts, int64_t numel, at::ScalarType dtype,
                          ReduceOp op) {
  reduce_over(out, parts, dtype, op, [numel](auto body) { parallel_over(0, numel, kGrainNumel, body); });
}

void reduce_in_rank_order_here(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op) {
  reduce_over(out.mutable_data_ptr(), places_of(parts), out.scalar_type(), op,
              [&](auto body) { body(0, out.numel()); });
}

}  // namespace tessera
