#include "core/layout/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "core/layout/flat_layout.h"

namespace tessera::bucket_plan_test {
using namespace internal;
namespace {

TEST(BucketPlan, EveryParameterIsInOneBucketOfItsKeyInTheOrderInWhichBucketsFill) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<BucketItem> items(random() % 30);
    for (auto& item : items)
      item = {random() % 7 == 0 ? int64_t{1} << 18 : static_cast<int64_t>(random() % 90),
              random() % 4 == 0 ? at::kHalf : at::kFloat, static_cast<int64_t>(random() % 3)};
    std::vector<size_t> order(items.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    const auto bucket_bytes = static_cast<int64_t>(random() % 3 == 0 ? 0 : random() % 1200);
    size_t last_full = 0;
    std::multiset<size_t> seen;
    for (const auto& members : plan_buckets(items, order, {.bucket_bytes = bucket_bytes})) {
      size_t full = 0;
      std::vector<int64_t> numels;
      const BucketItem& first = items[members[0]];
      for (size_t member : members) {
        seen.insert(member);
        EXPECT_EQ(items[member].key, first.key);
        EXPECT_EQ(items[member].dtype, first.dtype);
        numels.push_back(items[member].numel);
        full = std::max<size_t>(full, std::find(order.begin(), order.end(), member) - order.begin());
      }
      const auto element_bytes = static_cast<int64_t>(c10::elementSize(first.dtype));
      const FlatLayout layout = FlatLayout::whole(numels, 1, FlatLayout::alignment_numel(element_bytes));
      EXPECT_TRUE(members.size() == 1 || layout.full_numel() * element_bytes <= bucket_bytes);
      EXPECT_GE(full, last_full);
      last_full = full;
    }
    EXPECT_EQ(seen.size(), items.size());
    EXPECT_EQ(std::set<size_t>(seen.begin(), seen.end()).size(), items.size());
  }
}

TEST(BucketPlan, TheFirstBucketMayBeSmaller) {
  const std::vector<BucketItem> items(10, {16, at::kFloat});
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto buckets = plan_buckets(items, order, {.bucket_bytes = 4 * 64, .first_bytes = 64});
  ASSERT_EQ(buckets.size(), 4U);
  EXPECT_EQ(buckets[0], (std::vector<size_t>{0}));
  EXPECT_EQ(buckets[1].size(), 4U);
}

}  // namespace
}  // namespace tessera::bucket_plan_test
