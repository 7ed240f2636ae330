// Stragglers and their operations.
#include <thread>

#include <tessera/wait_report.h>
#include "tests/support/reference.h"

namespace tessera::wait_report_test {
using namespace internal;
namespace {

using namespace testing_support;

TEST(WaitReport, NamesTheRankThatTheOthersWaitFor) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    comm->all_reduce(torch::ones({10}), ReduceOp::kSum, "what came before").wait();
    WaitReporter waits(*comm);
    auto part = comm->split(0);  // waits in a part count as well
    for (int step = 0; step < 5; ++step) {
      if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      part->all_reduce(torch::ones({10}), ReduceOp::kSum, "gradients").wait();
      comm->all_reduce(torch::ones({1}), ReduceOp::kSum, "losses").wait();
    }
    const auto report = waits.report();
    ASSERT_EQ(report.ranks.size(), 3u);
    for (const int other : {0, 2}) {
      EXPECT_LT(report.ranks[1].wait_s, report.ranks[other].wait_s);
      EXPECT_GE(report.ranks[other].wait_s, report.ranks[other].longest_s);
      expect_contains(report.ranks[other].operation, "all-reduce of gradients");
    }
    EXPECT_EQ(report.waited_for(), 1);
    expect_contains(report.text(), "rank 1 is waited for");
    expect_contains(report.text(), "most in all-reduce of gradients");
  });
}

TEST(WaitReport, RanksThatWaitAlikeWaitForNobody) {
  WaitReport report{.ranks = {{2.0, 1, "a"}, {2.3, 1, "a"}, {2.1, 1, "a"}, {2.9, 1, "a"}}, .elapsed_s = 10};
  EXPECT_EQ(report.waited_for(), std::nullopt);
  EXPECT_EQ(report.text(), "no rank is waited for: ranks waited 20% to 29% of 10.0 s");
  EXPECT_EQ(report.waited_for(0.01), 0);
  report.ranks[3] = {0.1, 0.1, "b"};
  report.ranks[1].operation = "all-gather of blocks.3 (12 elements)";
  EXPECT_EQ(report.text(),
            "rank 3 is waited for: it waited 1% of 10.0 s, the others 21% (median), most in all-gather of blocks.3 (12 "
            "elements)");
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    const auto alone = WaitReporter(*comm).report();
    EXPECT_EQ(alone.waited_for(), std::nullopt);
    EXPECT_EQ(alone.ranks.size(), 1u);
  });
}

}  // namespace
}  // namespace tessera::wait_report_test
