// Ranks that share cores: the order of threads, the cost of collectives for each rank, and steps written by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>
#include "plan/simulate/collective_flow.h"
#include "plan/simulate/core_turns.h"
#include "plan/simulate/shared_cores.h"
#include "tests/plan/script.h"
#include "tests/support/reference.h"

namespace tessera::shared_cores_test {
using namespace internal;
namespace {

using namespace plan_tests;
using namespace testing_support;

// The end of each thread's only burst.
std::vector<double> ends_of(int cores, const std::vector<double>& bursts_s, const std::vector<double>& begins_s) {
  std::vector<double> ends_s(bursts_s.size(), -1);
  std::vector<bool> began(bursts_s.size(), false);
  CoreTurns* all = nullptr;
  CoreTurns turns(bursts_s.size(), cores, [&](size_t thread) {
    if (!began[thread]) {
      began[thread] = true;
      all->burst(thread, bursts_s[thread]);
    } else {
      ends_s[thread] = all->now_s();
      all->sleep(thread);
    }
  });
  all = &turns;
  for (size_t thread = 0; thread < bursts_s.size(); ++thread) turns.sleep(thread, begins_s[thread]);
  while (std::ranges::any_of(ends_s, [](double end_s) { return end_s < 0; })) turns.advance();
  EXPECT_THROW(turns.advance(), std::logic_error);  // all sleep forever
  return ends_s;
}

// Slices rotate. A late thread has the least time, so it runs next, but gets no credit for the past.
TEST(CoreTurns, AreFair) {
  constexpr double kSliceSeconds = CoreTurns::kSliceSeconds;
  EXPECT_EQ(ends_of(2, {1, 2}, {0, 0}), (std::vector<double>{1, 2}));
  EXPECT_EQ(ends_of(1, {1, 1}, {0, 5}), (std::vector<double>{1, 6}));
  auto two = ends_of(1, {10 * kSliceSeconds, 10 * kSliceSeconds}, {0, 0});
  std::ranges::sort(two);  // rounding decides the order of the two in a turn
  EXPECT_NEAR(two[0], 19 * kSliceSeconds, 1e-9);
  EXPECT_NEAR(two[1], 20 * kSliceSeconds, 1e-9);
  const auto late = ends_of(1, {100 * kSliceSeconds, 40 * kSliceSeconds}, {0, 50.5 * kSliceSeconds});
  EXPECT_NEAR(late[0], 140 * kSliceSeconds, 1e-9);
  EXPECT_NEAR(late[1], (50.5 + 2 * 40) * kSliceSeconds, 2 * kSliceSeconds);
}

RecordedCollective collective(const std::string& operation, int ranks, int64_t bytes, std::vector<int> members = {}) {
  RecordedCollective made{operation, "x", ranks, bytes, 1};
  if (!members.empty()) made.members = std::make_shared<const std::vector<int>>(std::move(members));
  return made;
}

// Rows and columns of a grid follow from one rank's; other groups are known only to their members.
TEST(CollectiveFlow, GroupsOfOtherRanks) {
  EXPECT_EQ(group_of(collective("all-gather", 3, 8), 7), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(group_of(collective("all-gather", 2, 8, {2, 3}), 5), (std::vector<int>{4, 5}));
  EXPECT_EQ(group_of(collective("all-gather", 2, 8, {0, 4}), 7), (std::vector<int>{3, 7}));
  EXPECT_EQ(group_of(collective("all-gather", 2, 8, {1, 2}), 2), (std::vector<int>{1, 2}));
  expect_contains(error_of<std::invalid_argument>([] { group_of(collective("all-gather", 2, 8, {1, 2}), 0); }),
                  "no row or column of a grid");
}

constexpr int64_t kBytes = 1 << 22;

// Mean bytes of each rank, as in the communicator.
TEST(CollectiveFlow, WorkOfRanks) {
  const auto copied = [](const std::string& operation, int ranks, int64_t bytes = kBytes) {
    return work_of(collective(operation, ranks, bytes)).copied_bytes;
  };
  EXPECT_EQ(copied("all-gather", 1), 0);
  EXPECT_EQ(copied("all-gather", 4), 0.75 * kBytes);
  EXPECT_EQ(copied("all-reduce", 4), 1.5 * kBytes);
  EXPECT_EQ(copied("all-reduce", 4, 1024), 3 * 1024);  // whole, in one exchange
  EXPECT_EQ(copied("reduce", 4), 0.75 * kBytes);       // three messages, each of all bytes, among four
  EXPECT_EQ(copied("broadcast", 2), 0.5 * kBytes);
  EXPECT_EQ(copied("broadcast", 4), 0.75 * kBytes / 4 + 0.75 * kBytes);  // parts, which are then gathered
  EXPECT_EQ(work_of(collective("reduce", 4, kBytes)).summed_bytes, 0.75 * kBytes);
  EXPECT_EQ(work_of(collective("all-reduce", 4, kBytes)).operations, 4);
  expect_contains(error_of<std::invalid_argument>([] { work_of(collective("gossip", 2, 8)); }), "gossip");
}

// The simulation has events in proportion to the time: a longer time would take hours.
TEST(SharedCores, RefusesOperatorsOfHours) {
  MachineSpeed speed = plain();
  speed.cores = 1;
  Script script;
  script.compute(1);
  script.wait(script.start("all-gather", 8, 2));
  for (const double seconds : {std::numeric_limits<double>::infinity(), 1e9, std::nan("")}) {
    speed.operator_s = seconds;
    expect_contains(error_of<std::invalid_argument>([&] { predict_step(script.record, speed); }),
                    "an operator or message");
  }
}

// Ranks beyond the cores take turns: slice by slice, or in sequence if they soon wait for each other.
TEST(SharedCores, RanksTakeTurns) {
  MachineSpeed speed = plain();
  speed.cores = 2;
  const auto seconds = [&](int ranks, double work_s, int64_t bytes = 0) {
    Script script;
    script.compute(work_s);
    script.wait(script.start("all-gather", bytes, ranks));
    return predict_step(script.record, speed).total_s;
  };
  EXPECT_NEAR(seconds(1, 1), 1, 1e-6);
  EXPECT_NEAR(seconds(2, 1), 1, 1e-6);
  EXPECT_NEAR(seconds(4, 1), 2, 0.01);
  EXPECT_NEAR(seconds(8, 1), 4, 0.02);
  EXPECT_NEAR(seconds(3, 1), 1.5, 0.01);
  EXPECT_NEAR(seconds(3, 1e-4), 2e-4, 1e-6);
  // The second to arrive copies: two that arrive together copy one message each, or one copies both.
  const double copied_s = seconds(2, 1, 8 * kGB) - 1;
  EXPECT_GE(copied_s, 4 - 1e-6);
  EXPECT_LE(copied_s, 8 + 1e-6);
  // Four ranks on two cores copy 4 x 3 messages of 2 GB at 1 GB/s a core.
  const double copied_by_four_s = seconds(4, 1, 8 * kGB) - 2;
  EXPECT_GE(copied_by_four_s, 12 - 0.1);
  EXPECT_LE(copied_by_four_s, 16);
}

// Ranks with more work delay the others, and time passes while ranks sleep.
TEST(SharedCores, TheSlowestIsWaitedFor) {
  MachineSpeed speed = plain();
  speed.cores = 2;
  std::vector<RunRecord> records;
  for (const double work_s : {1.0, 3.0}) {
    Script script;
    script.compute(work_s);
    script.wait(script.start("all-gather", 0));
    records.push_back(script.record);
  }
  const StepTime time = predict_step(records, speed);
  EXPECT_NEAR(time.total_s, 3, 1e-6);
  EXPECT_NEAR(time.compute_s, 1, 1e-6);
  EXPECT_NEAR(time.exposed_s, 2, 1e-6);
  EXPECT_NEAR(time.processor_s, 1, 1e-6);
  speed.wake_s = 0.5;
  EXPECT_NEAR(predict_step(records, speed).total_s, 3, 0.6);
  expect_contains(error_of<std::invalid_argument>([&] { predict_step(std::vector<RunRecord>(), speed); }), "no record");
}

// Between hosts the link works beside compute, but TCP uses time of a core.
TEST(SharedCores, HostsExchangeBesideCompute) {
  MachineSpeed speed = plain();
  speed.cores = 2;
  speed.ranks_per_host = 1;
  speed.between_hosts.bytes_per_s = 1e9;
  Script script;
  const size_t gather = script.start("all-gather", 8 * kGB);  // 4 GB out, 4 s
  script.compute(3);
  script.wait(gather);
  EXPECT_NEAR(predict_step(script.record, speed).total_s, 4, 1e-6);
  speed.tcp.bytes_per_s = 2e9;  // 2 s of the other core
  EXPECT_NEAR(predict_step(script.record, speed).total_s, 4, 0.1);
  speed.cores = 1;
  EXPECT_NEAR(predict_step(script.record, speed).total_s, 5, 1);
  speed.shares_cores_between_hosts = true;
  EXPECT_NEAR(predict_step(script.record, speed).total_s, 10, 1);
}

// Incoming data uses the host's link too: at a reduction's root, to which three ranks send, and at the receivers of a
// broadcast.
TEST(SharedCores, LinksAreFullInBothDirections) {
  MachineSpeed speed = plain();
  speed.cores = 8;
  speed.ranks_per_host = 1;
  speed.between_hosts.bytes_per_s = 1e9;
  const auto seconds = [&](const std::string& operation, int ranks, int root) {
    Script script;
    script.wait(script.start(operation, 2 * kGB, ranks));
    script.record.collectives[0].root = root;
    return predict_step(script.record, speed).total_s;
  };
  for (const bool is_one_machine : {false, true}) {
    speed.shares_cores_between_hosts = is_one_machine;
    EXPECT_NEAR(seconds("reduce", 4, 0), 6, 0.01) << is_one_machine;
    EXPECT_NEAR(seconds("broadcast", 2, 1), 2, 0.01) << is_one_machine;
    EXPECT_NEAR(seconds("all-gather", 4, 0), 1.5, 0.01) << is_one_machine;
  }
}

// Two hosts of two ranks: TCP adds up data from the other host; groups may be in one host or across.
TEST(SharedCores, GroupsWithinAndAcrossHosts) {
  MachineSpeed speed = plain();
  speed.cores = 2;
  speed.ranks_per_host = 2;
  speed.between_hosts.bytes_per_s = 0.5e9;
  const auto seconds = [&](std::vector<int> members) {
    Script script;
    script.wait(script.start("all-gather", 2 * kGB, 2, std::move(members)));
    return predict_step(script.record, speed).total_s;
  };
  EXPECT_GE(seconds({0, 1}), 1 - 1e-6);  // one copies, or both do
  EXPECT_LE(seconds({0, 1}), 2 + 1e-6);
  EXPECT_NEAR(seconds({0, 2}), 2, 0.01);
}

TEST(SharedCores, RefusesWhatIsNoHost) {
  MachineSpeed speed = plain();
  speed.cores = 2;
  Script script;
  script.compute(1);
  script.wait(script.start("all-gather", kGB, 300));
  const auto error = [&](const std::vector<RunRecord>& records) {
    return error_of<std::invalid_argument>([&] { predict_step(records, speed); });
  };
  expect_contains(error({script.record}), "300 ranks that share 2 cores, expected at most 256");
  script.record.collectives[0].ranks = 3;
  speed.ranks_per_host = 3;
  expect_contains(error({script.record, script.record}), "2 records");
  Script other = script;
  other.record.collectives[0].operation = "broadcast";
  speed.ranks_per_host = 0;
  expect_contains(error({script.record, script.record, other.record}), "ranks 0 and 2");
  speed.within_host.bytes_per_s = 0;
  expect_contains(error({script.record}), "between ranks of a host");
}

}  // namespace
}  // namespace tessera::shared_cores_test
