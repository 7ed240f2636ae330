// The pool of host memory: exact counts, reuse, the limit.
#include "core/memory/pinned_pool.h"
#include "tests/support/reference.h"

namespace tessera::pinned_pool_test {
using namespace internal;
namespace {

using namespace testing_support;

TEST(PinnedPool, CountsWhatIsLentAndKeepsNoneThatIsNotLocked) {
  PinnedPool pool({});
  at::Tensor first = pool.take(100, at::kFloat, "a test");
  EXPECT_EQ(first.sizes(), at::IntArrayRef({100}));
  EXPECT_EQ(first.scalar_type(), at::kFloat);
  EXPECT_EQ(pool.lent_bytes(), 400);
  at::Tensor view = first.narrow(0, 10, 5);
  first.reset();
  EXPECT_EQ(pool.lent_bytes(), 400);  // a view is alive
  view.reset();
  EXPECT_EQ(pool.lent_bytes(), 0);
  EXPECT_EQ(pool.owned_bytes(), 0);
  at::Tensor again = pool.take(200, at::kBFloat16, "a test");
  EXPECT_EQ(pool.owned_bytes(), 400);
  EXPECT_EQ(pool.peak_lent_bytes(), 400);
  again.fill_(1);
  EXPECT_EQ(again.sum().item<float>(), 200);
}

TEST(PinnedPool, RefusesMoreThanItsLimitAndStaysUsable) {
  PinnedPool pool({.limit_bytes = 1000});
  at::Tensor most = pool.take(200, at::kFloat, "most of it");
  const std::string error = error_of<std::runtime_error>([&] { pool.take(51, at::kFloat, "unit 'b'"); });
  expect_contains(error, "unit 'b'");
  expect_contains(error, "204 bytes asked for, 800 lent, of at most 1000 (host_limit_bytes)");
  EXPECT_EQ(pool.take(50, at::kFloat, "the rest").numel(), 50);
  EXPECT_NE(error_of<std::invalid_argument>([] { PinnedPool({.limit_bytes = -1}); }), "");
}

TEST(PinnedPool, TensorsOutliveThePool) {
  at::Tensor kept;
  {
    PinnedPool pool({});
    kept = pool.take(3, at::kDouble, "a test");
  }
  kept.fill_(2);
  EXPECT_EQ(kept.sum().item<double>(), 6);
  PinnedPool pool({});
  EXPECT_EQ(pool.take(0, at::kFloat, "nothing").numel(), 0);
  EXPECT_EQ(pool.owned_bytes(), 0);
}

}  // namespace
}  // namespace tessera::pinned_pool_test
