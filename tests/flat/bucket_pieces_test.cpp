#include "core/layout/flat_layout.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera::bucket_pieces_test {
using namespace internal;
namespace {

constexpr int64_t kLeastBytes = int64_t{256} << 10;

// Pieces are consecutive and cover the layout. Each large parameter is a piece of its own, and no other parameter is.
TEST(BucketPieces, LargeParametersHaveOnesOfTheirOwn) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> numels(1 + random() % 8);
    for (int64_t& numel : numels) numel = random() % 3 == 0 ? 65536 + random() % 9 : random() % 300;
    if (round % 5 == 0) numels[random() % numels.size()] = 0;
    const int world = 1 + static_cast<int>(random() % 5);
    const FlatLayout layout = FlatLayout::evenly(numels, world, 16);
    std::vector<size_t> large;
    int64_t end = 0;
    for (const BucketPiece& piece : cut_into_pieces(layout, 4, kLeastBytes)) {
      EXPECT_EQ(piece.range.begin, end);
      EXPECT_GT(piece.range.numel(), 0);
      end = piece.range.end;
      if (!piece.member) continue;
      large.push_back(*piece.member);
      EXPECT_EQ(piece.range.begin, layout.offset(static_cast<int64_t>(*piece.member)));
      EXPECT_EQ(piece.range.numel(), numels[*piece.member]);
    }
    EXPECT_EQ(end, layout.full_numel());
    std::vector<size_t> expected;
    for (size_t i = 0; i < numels.size(); ++i)
      if (4 * numels[i] >= kLeastBytes) expected.push_back(i);
    EXPECT_EQ(large, expected);
  }
}

}  // namespace
}  // namespace tessera::bucket_pieces_test
