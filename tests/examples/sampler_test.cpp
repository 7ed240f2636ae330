#include "data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>

namespace train_gpt {
namespace {

// Returns the windows of one step, over all ranks and micro-batches, in global order.
std::vector<int64_t> global_starts(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape, int64_t step) {
  std::vector<int64_t> all;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    WindowSampler sampler(text_numel, context, seed, shape);
    for (int64_t micro = 0; micro < shape.accumulation; ++micro) {
      const auto own = sampler.starts(step, micro, rank);
      EXPECT_EQ(static_cast<int64_t>(own.size()), shape.batch);
      all.insert(all.end(), own.begin(), own.end());
    }
  }
  return all;
}

struct Order {
  std::vector<int64_t> window;
  int64_t offset = 0;
};

Order make_epoch_order(uint64_t seed, int64_t epoch, int64_t windows, int64_t max_offset) {
  tessera::EpochOrder order(windows, seed);
  Order result{.offset = order.draw_of_epoch(epoch, max_offset + 1)};
  for (int64_t i = 0; i < windows; ++i) result.window.push_back(order.item(epoch * windows + i));
  return result;
}

TEST(Sampler, DrawsOfAnyBoundLeaveTheOrderOfItems) {
  tessera::EpochOrder order(7, 3), with_draws(7, 3);
  for (int64_t place = 0; place < 21; ++place) {
    const int64_t draw = with_draws.draw_of_epoch(place / 7, 1 + place);
    EXPECT_TRUE(draw >= 0 && draw <= place) << draw;
    EXPECT_EQ(with_draws.item(place), order.item(place));
  }
  EXPECT_THROW(order.draw_of_epoch(0, 0), std::invalid_argument);
  EXPECT_THROW(order.item(-1), std::invalid_argument);
}

// Positions of later items would overflow.
TEST(Sampler, RefusesTooLargePositions) {
  const tessera::DistributedSampler sampler(10, 0, 1, {.batch_numel = 4});
  auto values = sampler.state_values();
  values["taken"] = std::numeric_limits<int64_t>::max();
  EXPECT_THROW(sampler.check_state_values(values), std::invalid_argument);
}

TEST(Sampler, EveryShapeWithTheSameProductSeesTheSameSequences) {
  const std::vector<BatchShape> shapes = {{1, 12, 1}, {2, 6, 1}, {4, 3, 1}, {3, 2, 2}, {2, 1, 6}, {1, 1, 12}};
  for (int64_t step : {0, 1, 7, 100}) {
    const auto expected = global_starts(5000, 16, 3, shapes.front(), step);
    for (const auto& shape : shapes) EXPECT_EQ(global_starts(5000, 16, 3, shape, step), expected);
  }
}

// For many sizes: within an epoch, windows of all ranks and steps share no token, are inside the text, and are visited
// once.
TEST(Sampler, AnEpochVisitsEveryWindowOnceAndWindowsDoNotOverlap) {
  for (const int64_t context : {1, 7, 32}) {
    for (const int64_t text_numel : {context + 1, context + 2, 2 * context + 1, 3 * context, 1000 + context}) {
      for (const uint64_t seed : {0, 1, 99}) {
        const BatchShape shape{.ranks = 1, .batch = 1, .accumulation = 1};
        WindowSampler sampler(text_numel, context, seed, shape);
        const int64_t windows = sampler.windows_per_epoch();
        for (const int64_t epoch : {0, 1, 5}) {
          std::vector<int64_t> starts;
          for (int64_t i = 0; i < windows; ++i) starts.push_back(sampler.starts(epoch * windows + i, 0, 0).front());
          std::sort(starts.begin(), starts.end());
          EXPECT_GE(starts.front(), 0);
          EXPECT_LE(starts.back() + context + 1, text_numel);
          for (size_t i = 1; i < starts.size(); ++i) EXPECT_EQ(starts[i] - starts[i - 1], context + 1);
        }
      }
    }
  }
}

TEST(Sampler, RanksOfAStepShareNoWindow) {
  const BatchShape shape{.ranks = 4, .batch = 3, .accumulation = 2};
  for (int64_t step = 0; step < 10; ++step) {
    auto starts = global_starts(20000, 32, 1, shape, step);  // 605 windows: within the first epoch
    std::sort(starts.begin(), starts.end());
    for (size_t i = 1; i < starts.size(); ++i) EXPECT_GE(starts[i] - starts[i - 1], 33);
  }
}

TEST(Sampler, OrderAndOffsetChangeWithEpochAndSeed) {
  const auto order = make_epoch_order(1, 0, 100, 63);
  EXPECT_EQ(order.window, make_epoch_order(1, 0, 100, 63).window);
  EXPECT_NE(order.window, make_epoch_order(1, 1, 100, 63).window);
  EXPECT_NE(order.window, make_epoch_order(2, 0, 100, 63).window);
  std::set<int64_t> offsets;
  for (int64_t epoch = 0; epoch < 200; ++epoch) offsets.insert(make_epoch_order(1, epoch, 1, 7).offset);
  EXPECT_EQ(offsets, (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(Sampler, EveryPermutationIsAboutEquallyLikely) {
  std::map<std::vector<int64_t>, int> count;
  constexpr int kEpochs = 6000;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) ++count[make_epoch_order(7, epoch, 3, 0).window];
  ASSERT_EQ(count.size(), 6u);
  for (const auto& [order, times] : count) EXPECT_LT(std::abs(times - kEpochs / 6), 150);  // 5 sigma
}

TEST(ValidationStarts, AreSpreadOverTheTextWithoutOverlap) {
  EXPECT_EQ(validation_starts(100, 9, 5), (std::vector<int64_t>{0, 20, 40, 60, 80}));
  EXPECT_EQ(validation_starts(35, 9, 100), (std::vector<int64_t>{0, 10, 20}));
  EXPECT_EQ(validation_starts(10, 9, 1), (std::vector<int64_t>{0}));
}

}  // namespace
}  // namespace train_gpt
