// Properties of layouts over random parameters, worlds and alignments.
#include "core/layout/flat_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

namespace tessera::flat_layout_test {
using namespace internal;
namespace {

FlatLayout random_layout(std::mt19937& random, std::vector<int64_t>* numels) {
  const int64_t alignments[] = {1, 2, 8, 16};
  numels->clear();
  for (unsigned i = 0, count = random() % 12; i < count; ++i) {
    const int64_t limits[] = {1, 2, 10, 1000, 100000};
    numels->push_back(static_cast<int64_t>(random()) % limits[random() % 5]);
  }
  return FlatLayout::evenly(*numels, 1 + static_cast<int>(random() % 9), alignments[random() % 4]);
}

TEST(FlatLayout, ParametersAreAlignedInOrderAndApart) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<int64_t> numels;
    const FlatLayout layout = random_layout(random, &numels);
    int64_t end = 0, sum = 0;
    for (int64_t i = 0; i < layout.parameter_count(); ++i) {
      EXPECT_EQ(layout.numel(i), numels[i]);
      EXPECT_GE(layout.offset(i), end);
      end = layout.offset(i) + layout.numel(i);
      sum += numels[i];
    }
    EXPECT_EQ(layout.parameters_numel(), sum);
    EXPECT_LE(end, layout.full_numel());
    EXPECT_LT(layout.full_numel() - end, layout.world_size());  // the least padding that makes parts even
    EXPECT_EQ(layout.full_numel(), layout.shard_numel() * layout.world_size());
  }
}

TEST(FlatLayout, ShardsCoverEveryElementOnce) {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<int64_t> numels;
    const FlatLayout layout = random_layout(random, &numels);
    for (int64_t i = 0; i < layout.parameter_count(); ++i) {
      int64_t next = 0;
      for (int rank = 0; rank < layout.world_size(); ++rank) {
        const Range own = layout.owned(i, rank);
        if (own.numel() == 0) continue;
        EXPECT_EQ(own.begin, next);
        next = own.end;
        // The parameter and the shard locate one element alike.
        EXPECT_EQ(layout.offset(i) + own.begin, layout.shard(rank).begin + layout.offset_in_shard(i, rank));
        EXPECT_LE(layout.offset_in_shard(i, rank) + own.numel(), layout.shard_numel());
      }
      EXPECT_EQ(next, layout.numel(i));
    }
  }
}

TEST(FlatLayout, AlignmentHolds) {
  const FlatLayout layout = FlatLayout::evenly({3, 0, 5, 16, 1}, 3, 16);
  EXPECT_EQ(layout.offset(0), 0);
  EXPECT_EQ(layout.offset(1), 3);  // bytes need no alignment
  EXPECT_EQ(layout.offset(2), 16);
  EXPECT_EQ(layout.offset(3), 32);
  EXPECT_EQ(layout.offset(4), 48);
  EXPECT_EQ(layout.shard_numel(), 17);
  EXPECT_EQ(layout.full_numel(), 51);
}

TEST(FlatLayout, EmptyAndTiny) {
  const FlatLayout empty = FlatLayout::evenly({}, 4, 16);
  EXPECT_EQ(empty.full_numel(), 0);
  const FlatLayout one = FlatLayout::evenly({1}, 4, 16);
  EXPECT_EQ(one.shard_numel(), 1);
  EXPECT_EQ(one.owned(0, 0).numel(), 1);
  EXPECT_EQ(one.owned(0, 3).numel(), 0);
}

TEST(FlatLayout, OwnersGetTheirOwnParameters) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const int world = 1 + static_cast<int>(random() % 6);
    std::vector<int64_t> numels;
    std::vector<int> owners;
    for (unsigned i = 0, count = random() % 12; i < count; ++i) {
      numels.push_back(static_cast<int64_t>(random()) % 70);
      owners.push_back(static_cast<int>(random()) % world);
    }
    for (int& owner : owners) owner = std::abs(owner);
    for (int64_t& numel : numels) numel = std::abs(numel);
    std::sort(owners.begin(), owners.end());
    const FlatLayout layout = FlatLayout::by_owner(numels, owners, world, 16);
    int64_t end = 0;
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_EQ(layout.shard(rank).begin, end);
      end = layout.shard(rank).end;
      for (size_t i = 0; i < numels.size(); ++i)
        EXPECT_EQ(layout.owned(static_cast<int64_t>(i), rank).numel(), owners[i] == rank ? numels[i] : 0);
    }
    EXPECT_EQ(end, layout.full_numel());
    EXPECT_EQ(layout.counts().size(), static_cast<size_t>(world));
  }
  EXPECT_THROW(FlatLayout::by_owner({1, 1}, {1, 0}, 2, 1), std::invalid_argument);
  EXPECT_THROW(FlatLayout::by_owner({1}, {2}, 2, 1), std::invalid_argument);
}

TEST(FlatLayout, WholeIsEveryRanks) {
  const FlatLayout layout = FlatLayout::whole({3, 5}, 4, 16);
  EXPECT_EQ(layout.full_numel(), 21);
  EXPECT_EQ(layout.shard_numel(3), 21);
  EXPECT_EQ(layout.owned(1, 2).numel(), 5);
}

TEST(FlatLayout, RefusesNonsense) {
  EXPECT_THROW(FlatLayout::evenly({-1}, 2, 1), std::invalid_argument);
  EXPECT_THROW(FlatLayout::evenly({1}, 0, 1), std::invalid_argument);
  EXPECT_THROW(FlatLayout::evenly({1}, 1, 0), std::invalid_argument);
}

TEST(FlatLayout, ManyParametersOverManyRanks) {
  const FlatLayout layout = FlatLayout::evenly(std::vector<int64_t>(10000, 1000), 65536, 16);
  EXPECT_EQ(layout.shard_numel(), (10000 * 1008 - 8 + 65535) / 65536);
  int64_t owned = 0;
  for (int rank = 0; rank < 65536; ++rank) owned += layout.owned(5000, rank).numel();
  EXPECT_EQ(owned, 1000);
}

}  // namespace
}  // namespace tessera::flat_layout_test
