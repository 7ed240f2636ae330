// Compares clocks through the group's store. Ranks are threads with clocks of different offsets.
#include "core/launch/clock_exchange.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace tessera::clock_exchange_test {
using namespace internal;
namespace {

std::vector<Trace::Run> agree(const std::vector<std::string>& clocks, const std::vector<int64_t>& skews_ns) {
  c10d::HashStore store;
  std::vector<Trace::Run> runs(clocks.size());
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < clocks.size(); ++rank)
    if (!clocks[rank].empty())
      ranks.emplace_back([&, rank] {
        runs[rank] = agree_on_traced_run(store, static_cast<int>(rank), clocks,
                                         [skew = skews_ns[rank]] { return steady_now_ns() + skew; });
      });
  for (auto& rank : ranks) rank.join();
  return runs;
}

// Rank 0 is not traced, so rank 1 is the reference; "b" and "c" are other hosts, with two ranks on "b".
TEST(ClockExchange, FindsWhatToAddWithinItsBound) {
  constexpr int64_t kSecond = 1'000'000'000;
  const auto runs =
      agree({"", "a", "b", "a", "c", "b"}, {0, 4 * kSecond, 7 * kSecond, 4 * kSecond, -3'000 * kSecond, 7 * kSecond});
  EXPECT_EQ(runs[1].id.size(), 32u);
  for (const size_t rank : {1, 2, 3, 4, 5}) EXPECT_EQ(runs[rank].id, runs[1].id);
  for (const size_t rank : {1, 3}) {
    EXPECT_EQ(runs[rank].offset_ns, 0);
    EXPECT_EQ(runs[rank].error_ns, 0);
  }
  for (const size_t rank : {2, 4}) {
    const int64_t expected = rank == 2 ? -3 * kSecond : 3'004 * kSecond;
    EXPECT_GT(runs[rank].error_ns, 0);
    EXPECT_LT(runs[rank].error_ns, 10 * kSecond);  // a thread can be late on a busy machine
    EXPECT_LE(std::llabs(runs[rank].offset_ns - expected), runs[rank].error_ns) << "rank " << rank;
  }
  EXPECT_EQ(runs[5].offset_ns, runs[2].offset_ns) << "ranks of a host share a clock";
  EXPECT_EQ(runs[5].error_ns, runs[2].error_ns);
}

}  // namespace
}  // namespace tessera::clock_exchange_test
