#include "fsdp/prefetch_order.h"

#include <gtest/gtest.h>

namespace tessera::prefetch_order_test {
using namespace internal;
namespace {

using Units = std::vector<int>;

void run(PrefetchOrder& order, const Units& units) {
  order.begin_pass();
  for (int unit : units) order.used(unit);
}

TEST(PrefetchOrder, KnowsNothingInTheFirstPass) {
  PrefetchOrder order;
  order.begin_pass();
  order.used(0);
  EXPECT_EQ(order.upcoming(3), Units{});
}

TEST(PrefetchOrder, PredictsTheOrderOfTheLastPass) {
  PrefetchOrder order;
  run(order, {0, 1, 2, 3});
  order.begin_pass();
  EXPECT_EQ(order.upcoming(1), Units{});  // before the first use
  order.used(0);
  EXPECT_EQ(order.upcoming(2), (Units{1, 2}));
  order.used(1);
  EXPECT_EQ(order.upcoming(1), Units{2});
  order.used(3);  // skips 2
  EXPECT_EQ(order.upcoming(2), Units{});
}

TEST(PrefetchOrder, FollowsPositionsNotUnits) {
  PrefetchOrder order;
  run(order, {0, 1, 0, 2});
  order.begin_pass();
  order.used(0);
  EXPECT_EQ(order.upcoming(3), (Units{1, 2}));  // without the unit in use
  order.used(1);
  EXPECT_EQ(order.upcoming(1), Units{0});
  order.used(0);
  EXPECT_EQ(order.upcoming(1), Units{2});
}

TEST(PrefetchOrder, CountsRepetitionsOnce) {
  PrefetchOrder order;
  run(order, {0, 0, 1, 1, 1, 2});
  EXPECT_EQ(order.seen(), (Units{0, 1, 2}));
}

TEST(PrefetchOrder, IsSilentOffThePathAndFindsItAgain) {
  PrefetchOrder order;
  run(order, {0, 1, 2, 3});
  order.begin_pass();
  order.used(7);
  EXPECT_EQ(order.upcoming(2), Units{});
  order.used(2);
  EXPECT_EQ(order.upcoming(2), Units{3});
}

TEST(PrefetchOrder, AnEmptyPassForgetsNothing) {
  PrefetchOrder order;
  run(order, {4, 5});
  order.begin_pass();
  order.begin_pass();
  order.used(4);
  EXPECT_EQ(order.upcoming(1), Units{5});
}

TEST(PrefetchOrder, APassWithoutEndDoesNotGrow) {
  PrefetchOrder order;
  for (size_t i = 0; i < 3 * PrefetchOrder::kLongestPass; ++i) order.used(static_cast<int>(i % 7));
  EXPECT_LE(order.seen().size(), PrefetchOrder::kLongestPass);
  EXPECT_LE(order.expected().size(), PrefetchOrder::kLongestPass);
}

TEST(PrefetchOrder, ForgetsTheThirdOfThreeEqualSequences) {
  PrefetchOrder order;
  run(order, {9, 1, 2, 3, 1, 2, 3, 1, 2});
  order.forget_repetition();
  EXPECT_EQ(order.seen(), (Units{9, 1, 2, 3, 1, 2, 3, 1, 2}));
  order.used(3);
  order.forget_repetition();
  EXPECT_EQ(order.seen(), (Units{9, 1, 2, 3, 1, 2, 3}));
  for (int i = 0; i < 1000; ++i) {
    order.used(i % 3 + 1);
    order.forget_repetition();
  }
  EXPECT_LT(order.seen().size(), 10U);
}

TEST(PrefetchOrder, TakesAnExpectationForTheFirstPass) {
  PrefetchOrder order;
  order.expect({3, 2, 1});
  order.begin_pass();
  order.used(3);
  EXPECT_EQ(order.upcoming(5), (Units{2, 1}));
}

}  // namespace
}  // namespace tessera::prefetch_order_test
