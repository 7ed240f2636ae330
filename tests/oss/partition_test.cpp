#include "core/layout/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace tessera::partition_test {
using namespace internal;
namespace {

TEST(Partition, HeaviestRankIsWithinOneParameterOfTheMean) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int world = 1 + static_cast<int>(random() % 9);
    std::vector<int64_t> bytes(random() % 40);
    for (auto& each : bytes) each = static_cast<int64_t>(random() % 5 == 0 ? 0 : random() % 1000);
    const Partition partition = partition_greedily(bytes, world);
    ASSERT_EQ(partition.owners.size(), bytes.size());
    std::vector<int64_t> owned(world);
    for (size_t i = 0; i < bytes.size(); ++i) owned.at(partition.owners[i]) += bytes[i];
    EXPECT_EQ(owned, partition.owned_bytes);
    const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    const int64_t largest = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
    EXPECT_LE(*std::max_element(owned.begin(), owned.end()), total / world + largest);
  }
}

TEST(Partition, LargestFirstToTheLeastLoadedAndWhatIsThereCounts) {
  EXPECT_EQ(partition_greedily({5, 9, 4, 6}, 2).owners, (std::vector<int>{1, 0, 0, 1}));
  EXPECT_EQ(partition_greedily({7, 7}, 3, {0, 100, 1}), (Partition{{0, 2}, {7, 100, 8}}));
  EXPECT_THROW(partition_greedily({1}, 0), std::invalid_argument);
}

}  // namespace
}  // namespace tessera::partition_test
