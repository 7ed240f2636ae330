#include "core/comm/rank_order_sum.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <bit>

#include "core/runtime/parallel_over.h"

namespace tessera::internal {
namespace {

constexpr int64_t kBlockNumel = 1024;     // elements of a block; its accumulators fit in the first-level cache
constexpr int64_t kGrainNumel = 1 << 16;  // smaller ranges are faster on one thread

// Both functions propagate a NaN of either argument, as torch::minimum() and torch::maximum() do.
template <class Accumulator>
Accumulator least(Accumulator one, Accumulator other) {
  return other < one || other != other ? other : one;
}
template <class Accumulator>
Accumulator most(Accumulator one, Accumulator other) {
  return other > one || other != other ? other : one;
}

// out[i] = combine(one[i], other[i]). `out` may be `one` or `other`, but must not overlap them otherwise.
template <class Out, class One, class Other, class Combine>
void join(Out* out, const One* one, const Other* other, int64_t numel, Combine combine) {
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<Out>(combine(one[i], other[i]));
}

// Reduces block by block. The first step combines two parts and the last step writes `out`, so no step only copies a
// block. For such a step the compiler would emit memcpy() or `rep movs`, which prefetch less than a loop.
template <class Scalar, class Combine, class End>
void reduce_range(Scalar* out, const std::vector<const Scalar*>& parts, int64_t begin, int64_t end, Combine combine,
                  End ends) {
  using Accumulator = at::opmath_type<Scalar>;
  const auto combine_last = [&](Accumulator one, Accumulator other) { return ends(combine(one, other)); };
  if (parts.size() == 1) {
    for (int64_t i = begin; i < end; ++i) out[i] = static_cast<Scalar>(ends(static_cast<Accumulator>(parts[0][i])));
    return;
  }
  const Scalar* const last = parts.back();
  if (parts.size() == 2) return join(out + begin, parts[0] + begin, last + begin, end - begin, combine_last);
  Accumulator sum[kBlockNumel];
  for (int64_t block = begin; block < end; block += kBlockNumel) {
    const int64_t numel = std::min(kBlockNumel, end - block);
    join(sum, parts[0] + block, parts[1] + block, numel, combine);
    for (size_t part = 2; part + 1 < parts.size(); ++part) join(sum, sum, parts[part] + block, numel, combine);
    join(out + block, sum, last + block, numel, combine_last);
  }
}

template <class Scalar>
void reduce_range(Scalar* out, const std::vector<const Scalar*>& parts, ReduceOp op, int64_t begin, int64_t end) {
  using Accumulator = at::opmath_type<Scalar>;
  const auto whole = [](Accumulator value) { return value; };
  const auto add = [](Accumulator one, Accumulator other) { return static_cast<Accumulator>(one + other); };
  switch (op) {
    case ReduceOp::kSum:
      return reduce_range(out, parts, begin, end, add, whole);
    case ReduceOp::kAverage:
      if (std::has_single_bit(parts.size()))  // the reciprocal is exact: a product has the bits of the quotient
        return reduce_range(out, parts, begin, end, add, [factor = 1.0 / static_cast<double>(parts.size())](auto sum) {
          return static_cast<Accumulator>(sum * static_cast<Accumulator>(factor));
        });
      return reduce_range(out, parts, begin, end, add, [divisor = static_cast<Accumulator>(parts.size())](auto sum) {
        return static_cast<Accumulator>(sum / divisor);
      });
    case ReduceOp::kMax:
      return reduce_range(out, parts, begin, end, most<Accumulator>, whole);
    case ReduceOp::kMin:
      return reduce_range(out, parts, begin, end, least<Accumulator>, whole);
  }
}

// `over(body)` must call body(begin, end) for ranges that together cover all elements.
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

void add_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op) {
  const at::ScalarType dtype = at::toOpMathType(out.scalar_type());
  at::Tensor sum = parts[0].to(dtype, /*non_blocking=*/true, /*copy=*/true);
  for (size_t part = 1; part < parts.size(); ++part) sum.add_(parts[part]);
  // Divides by a tensor: with a number as the divisor, CUDA would multiply by its rounded reciprocal.
  if (op == ReduceOp::kAverage) sum.div_(at::full({1}, static_cast<double>(parts.size()), sum.options()));
  out.copy_(sum, /*non_blocking=*/true);
}

std::vector<int64_t> even_counts(int64_t numel, int size) {
  std::vector<int64_t> counts(size, numel / size);
  for (int rank = 0; rank < numel % size; ++rank) ++counts[rank];
  return counts;
}

}  // namespace tessera::internal
