#include "fsdp/backward_progress.h"

#include <gtest/gtest.h>

namespace tessera::backward_progress_test {
using namespace internal;
namespace {

using Order = std::vector<size_t>;
bool all_train(size_t) { return true; }

// Unit 0 has buckets 0 and 1, unit 1 bucket 2, unit 2 none, unit 3 bucket 3.
BackwardProgress four_units() {
  BackwardProgress progress;
  progress.set_buckets({0, 2, 3, 3, 4});
  return progress;
}

TEST(BackwardProgress, ReducesInReverseOfTheFirstUses) {
  BackwardProgress progress = four_units();
  for (const size_t unit : {1, 0, 1, 2, 3}) progress.expect(unit);
  EXPECT_EQ(progress.begin(all_train), (Order{3, 0, 1, 2}));
  progress.end();
  progress.expect(0);
  EXPECT_EQ(progress.begin(all_train), (Order{0, 1}));
}

TEST(BackwardProgress, KeepsTheOrderForASecondBackward) {
  BackwardProgress progress = four_units();
  EXPECT_EQ(progress.begin(all_train), Order());
  progress.expect(0);
  progress.expect(3);
  progress.begin(all_train);
  progress.end();
  EXPECT_EQ(progress.begin(all_train), (Order{3, 0, 1}));
}

TEST(BackwardProgress, CompletesAUnitWithItsLastTrainedBucket) {
  BackwardProgress progress = four_units();
  progress.begin([](size_t bucket) { return bucket != 2; });
  EXPECT_FALSE(progress.is_complete(0));
  EXPECT_TRUE(progress.is_complete(1));  // frozen
  EXPECT_TRUE(progress.is_complete(2));  // without buckets
  progress.complete(0, 1);
  progress.complete(0, 1);
  EXPECT_FALSE(progress.is_complete(0));
  progress.complete(0, 0);
  EXPECT_TRUE(progress.is_complete(0));
  progress.begin(all_train);
  EXPECT_FALSE(progress.is_complete(0));
}

}  // namespace
}  // namespace tessera::backward_progress_test
