// Compares the kernel of all reductions with libtorch's own operators, applied one after the other.
#include "core/comm/rank_order_sum.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include "tests/support/reference.h"

namespace tessera::rank_order_sum_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int64_t kNumels[] = {0, 1, 3, 1023, 1024, 1025, 5000};  // around a block, and several blocks with a rest
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                      at::kInt,   at::kLong,   at::kByte};

// Values of all magnitudes and both signs, some NaN, at different places in each part.
at::Tensor drawn_part(int part, int64_t numel, at::ScalarType dtype) {
  const at::Tensor random = seeded(7 + part, [&] { return torch::randn({numel}, at::kDouble) * 10; });
  if (!at::isFloatingType(dtype)) return random.abs().to(dtype);
  at::Tensor values = random * torch::pow(10.0, torch::arange(numel) % 3 - 1);
  return values.masked_fill(torch::arange(numel) % 11 == part, std::numeric_limits<double>::quiet_NaN()).to(dtype);
}

at::Tensor by_torch(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const at::ScalarType dtype = parts[0].scalar_type();
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor result = parts[0].to(is_short ? at::kFloat : dtype);
  for (size_t i = 1; i < parts.size(); ++i) {
    const at::Tensor part = parts[i].to(result.dtype());
    result = op == ReduceOp::kMax   ? torch::maximum(result, part)
             : op == ReduceOp::kMin ? torch::minimum(result, part)
                                    : result + part;
  }
  if (op == ReduceOp::kAverage) result = result / static_cast<double>(parts.size());
  return result.to(dtype);
}

// NaN is NaN, whatever its bits.
bool are_same(const at::Tensor& one, const at::Tensor& other) {
  if (!at::isFloatingType(one.scalar_type())) return torch::equal(one, other);
  return torch::equal(one.isnan(), other.isnan()) &&
         torch::equal(one.masked_fill(one.isnan(), 0), other.masked_fill(other.isnan(), 0));
}

void expect_as_torch(int world, int64_t numel, at::ScalarType dtype, ReduceOp op) {
  std::vector<at::Tensor> parts;
  for (int part = 0; part < world; ++part) parts.push_back(drawn_part(part, numel, dtype));
  const at::Tensor expected = by_torch(parts, op);
  const at::Tensor apart = torch::empty_like(parts[0]), here = torch::empty_like(parts[0]);
  reduce_in_rank_order(apart, parts, op);
  reduce_in_rank_order_here(here, parts, op);
  EXPECT_TRUE(are_same(apart, expected));
  EXPECT_TRUE(are_same(here, expected));
  if (at::isFloatingType(dtype) && (op == ReduceOp::kSum || op == ReduceOp::kAverage)) {
    const at::Tensor added = torch::empty_like(parts[0]);
    add_in_rank_order(added, parts, op);
    EXPECT_TRUE(are_same(added, apart));
  }
  for (size_t own = 0; own < parts.size(); ++own) {  // in place of each part
    std::vector<at::Tensor> copies;
    for (const at::Tensor& part : parts) copies.push_back(part.clone());
    reduce_in_rank_order(copies[own], copies, op);
    EXPECT_TRUE(are_same(copies[own], expected)) << "in part " << own;
    for (size_t other = 0; other < parts.size(); ++other)
      EXPECT_TRUE(are_same(copies[other], other == own ? expected : parts[other])) << "part " << other;
  }
}

TEST(RankOrderSum, IsThatOfTorchsOperatorsInTurn) {
  for (int world = 1; world <= 5; ++world)
    for (const int64_t numel : kNumels)
      for (const at::ScalarType dtype : kDtypes)
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax, ReduceOp::kMin}) {
          if (op == ReduceOp::kAverage && !at::isFloatingType(dtype)) continue;
          SCOPED_TRACE(
              c10::str(world, " parts of ", numel, " elements of ", dtype, ", operation ", static_cast<int>(op)));
          expect_as_torch(world, numel, dtype, op);
        }
}

}  // namespace
}  // namespace tessera::rank_order_sum_test
