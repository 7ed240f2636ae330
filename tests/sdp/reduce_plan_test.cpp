#include "tessera/sdp/reduce_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

namespace tessera::reduce_plan_test {
namespace {

TEST(ReducePlan, EveryParameterIsInOneBucketOfItsOwnerInTheOrderInWhichBucketsFill) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<ReducedParameter> parameters(random() % 30);
    for (auto& parameter : parameters)
      parameter = {random() % 7 == 0 ? int64_t{1} << 18 : static_cast<int64_t>(random() % 90),
                   static_cast<int>(random() % 3), random() % 4 == 0 ? at::kHalf : at::kFloat};
    std::vector<size_t> order(parameters.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    const auto buffer_numel = static_cast<int64_t>(random() % 3 == 0 ? 0 : random() % 300);
    size_t last_full = 0;
    std::multiset<size_t> seen;
    for (const ReduceBucket& bucket : plan_reduction(parameters, order, buffer_numel)) {
      size_t full = 0;
      int64_t end = 0;
      for (size_t i = 0; i < bucket.members.size(); ++i) {
        const ReducedParameter& parameter = parameters[bucket.members[i]];
        seen.insert(bucket.members[i]);
        EXPECT_EQ(parameter.owner, bucket.owner);
        EXPECT_EQ(parameter.dtype, parameters[bucket.members[0]].dtype);
        EXPECT_GE(bucket.offsets[i], end);
        EXPECT_EQ(bucket.offsets[i] * static_cast<int64_t>(c10::elementSize(parameter.dtype)) % 64, 0);
        end = bucket.offsets[i] + parameter.numel;
        full = std::max<size_t>(full, std::find(order.begin(), order.end(), bucket.members[i]) - order.begin());
      }
      EXPECT_EQ(bucket.numel, end);
      EXPECT_TRUE(bucket.members.size() == 1 || bucket.numel <= buffer_numel);
      EXPECT_GE(full, last_full);
      last_full = full;
    }
    EXPECT_EQ(seen.size(), parameters.size());
    EXPECT_EQ(std::set<size_t>(seen.begin(), seen.end()).size(), parameters.size());
  }
}

}  // namespace
}  // namespace tessera::reduce_plan_test
