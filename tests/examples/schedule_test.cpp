#include "trainer.h"

#include <gtest/gtest.h>

namespace train_gpt {
namespace {

TEST(Schedule, WarmsUpLinearlyThenFallsToATenth) {
  const Schedule schedule{.peak = 2.0, .warmup = 4, .steps = 104};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 2.0);
  EXPECT_DOUBLE_EQ(schedule.at(4), 2.0);
  EXPECT_NEAR(schedule.at(53), 1.1, 0.02);  // half way
  EXPECT_NEAR(schedule.at(103), 0.2, 1e-12);
  for (int64_t step = 5; step < 104; ++step) EXPECT_LT(schedule.at(step), schedule.at(step - 1));
}

TEST(Schedule, ShortRuns) {
  EXPECT_DOUBLE_EQ((Schedule{.peak = 1.0, .warmup = 0, .steps = 1}).at(0), 1.0);
  EXPECT_DOUBLE_EQ((Schedule{.peak = 1.0, .warmup = 1, .steps = 1}).at(0), 1.0);
  const Schedule all_warmup{.peak = 1.0, .warmup = 2, .steps = 2};
  EXPECT_DOUBLE_EQ(all_warmup.at(0), 0.5);
  EXPECT_DOUBLE_EQ(all_warmup.at(1), 1.0);
}

}  // namespace
}  // namespace train_gpt
