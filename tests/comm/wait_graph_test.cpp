// Deadlocks of ranks that wait in several groups.
#include "core/comm/watchdog/wait_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace tessera::wait_graph_test {
using namespace internal;
namespace {

using Waits = std::vector<std::vector<GroupWait>>;

std::string cycle_from(int rank, const Waits& waits) {
  const int size = static_cast<int>(waits.size());
  const WaitCycle cycle = find_wait_cycle(rank, size, [&](int other) { return waits[other]; });
  return cycle.empty() ? "" : cycle_text(cycle, size);
}

TEST(WaitGraph, NamesTheRanksAndWhatTheyWaitFor) {
  const Waits waits{{{"", {}, 5, "all-reduce of a loss", {{"", 6}, {"/a", 3}}}},
                    {{"/a", {0, 1}, 3, "barrier in the group of ranks 0, 1 of 3", {{"", 5}, {"/a", 4}}}},
                    {{"", {}, 5, "all-reduce of a loss", {{"", 6}}}}};
  EXPECT_EQ(cycle_from(0, waits),
            "ranks wait for each other in different groups: rank 0 in operation #5, all-reduce of a loss in the "
            "group of all 3 ranks; rank 1 in operation #3, barrier in the group of ranks 0, 1 of 3");
  // Rank 2 is in no cycle, and waits for one.
  EXPECT_NE(cycle_from(2, waits), "");
  // A started operation is not awaited, nor one that another thread of the rank is to start.
  for (const auto& started : {std::map<std::string, uint64_t>{{"", 6}, {"/a", 4}}, {{"/a", 4}}}) {
    Waits others = waits;
    others[1][0].started = started;
    EXPECT_EQ(cycle_from(0, others), "");
  }
}

TEST(WaitGraph, NamesTheFirstRanksOfMany) {
  Waits waits;
  constexpr int kRanks = 1000;
  for (int rank = 0; rank < kRanks; ++rank) {
    const int next = (rank + 1) % kRanks;
    const std::string own = "/" + std::to_string(rank), before = "/" + std::to_string((rank + kRanks - 1) % kRanks);
    waits.push_back({{own, {rank, next}, 0, "barrier", {{own, 1}, {before, 0}}}});
  }
  const std::string text = cycle_from(3, waits);
  EXPECT_TRUE(text.ends_with("; rank 10 in operation #0, barrier; 992 more")) << text;
}

TEST(WaitGraph, WaitsAreReadAsTheyWereWritten) {
  const std::vector<GroupWait> waits{{"", {}, 1ULL << 40, "all-reduce of 'ü \"\n'", {{"", 7}, {"/split0/1", 0}}},
                                     {"/split0/1", {3, 5}, 0, "barrier", {}}};
  EXPECT_EQ(waits_of_text(text_of_waits(waits)), waits);
  EXPECT_EQ(text_of_waits({}), "");
  EXPECT_TRUE(waits_of_text("").empty());
  EXPECT_NO_THROW(text_of_waits({{"", {}, 0, "not UTF-8: \xff", {}}}));
}

// Ranks that run random programs of operations in random groups, until all running ranks wait.
class Programs {
 public:
  explicit Programs(unsigned seed) : random_(seed) {
    const int ranks = pick(2, 6);
    groups_.emplace_back();
    for (int rank = 0; rank < ranks; ++rank) groups_[0].push_back(rank);
    for (int i = pick(1, 4); i > 0; --i) {
      std::vector<int> members;
      for (int rank = 0; rank < ranks; ++rank)
        if (pick(0, 1) == 1) members.push_back(rank);
      if (members.size() > 1) groups_.push_back(members);
    }
    started_.assign(ranks, std::vector<uint64_t>(groups_.size()));
    waits_for_.assign(ranks, -1);
    // One program, in which ranks may have swapped or left out operations.
    programs_.resize(ranks);
    for (int i = 0; i < 8; ++i) {
      const int group = pick(0, static_cast<int>(groups_.size()) - 1);
      for (int rank : groups_[group])
        if (pick(0, 19) > 0) programs_[rank].push_back(group);
    }
    for (auto& program : programs_)
      if (program.size() > 1 && pick(0, 2) == 0) {
        const int at = pick(0, static_cast<int>(program.size()) - 2);
        std::swap(program[at], program[at + 1]);
      }
  }

  // A rank that computes counts as one that does not wait.
  void run() {
    const int stands_still = pick(0, 3) == 0 ? pick(0, size() - 1) : -1;
    const size_t from = pick(0, 5);
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (int rank = 0; rank < size(); ++rank) {
        if (waits_for_[rank] >= 0 && !is_over(waits_for_[rank], started_[rank][waits_for_[rank]])) continue;
        waits_for_[rank] = -1;
        size_t& next = next_[rank];
        if (next == programs_[rank].size() || (rank == stands_still && next >= from)) continue;
        waits_for_[rank] = programs_[rank][next++];
        ++started_[rank][waits_for_[rank]];
        goes_on = true;
      }
    }
  }

  int size() const { return static_cast<int>(programs_.size()); }

  Waits waits() const {
    Waits all(size());
    for (int rank = 0; rank < size(); ++rank) {
      if (waits_for_[rank] < 0) continue;
      const int group = waits_for_[rank];
      GroupWait wait{name(group), group == 0 ? std::vector<int>() : groups_[group], started_[rank][group] - 1, "", {}};
      for (size_t i = 0; i < groups_.size(); ++i)
        if (is_in(rank, static_cast<int>(i))) wait.started[name(static_cast<int>(i))] = started_[rank][i];
      all[rank].push_back(wait);
    }
    return all;
  }

  // A rank continues if all ranks that it waits for continue. The others are in a deadlock.
  std::vector<bool> may_go_on() const {
    std::vector<bool> may(size());
    for (bool is_new = true; is_new;) {
      is_new = false;
      for (int rank = 0; rank < size(); ++rank) {
        if (may[rank]) continue;
        bool can = true;
        if (const int group = waits_for_[rank]; group >= 0)
          for (int other : groups_[group]) can &= started_[other][group] >= started_[rank][group] || may[other];
        is_new |= can;
        may[rank] = can;
      }
    }
    return may;
  }

 private:
  int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }
  bool is_in(int rank, int group) const {
    return std::find(groups_[group].begin(), groups_[group].end(), rank) != groups_[group].end();
  }
  bool is_over(int group, uint64_t count) const {
    return std::all_of(groups_[group].begin(), groups_[group].end(),
                       [&](int rank) { return started_[rank][group] >= count; });
  }
  static std::string name(int group) { return group == 0 ? "" : "/" + std::to_string(group); }

  std::mt19937 random_;
  std::vector<std::vector<int>> groups_, programs_;  // by rank: the groups of its operations
  std::vector<std::vector<uint64_t>> started_;       // by rank and group
  std::vector<int> waits_for_;                       // by rank: a group, or none
  std::map<int, size_t> next_;
};

TEST(WaitGraph, FindsACycleWhereRanksNeverGoOn) {
  int with = 0, without = 0;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    Programs programs(seed);
    programs.run();
    const Waits waits = programs.waits();
    const auto may_go_on = programs.may_go_on();
    for (int rank = 0; rank < programs.size(); ++rank) {
      ASSERT_EQ(cycle_from(rank, waits).empty(), may_go_on[rank]) << "seed " << seed << ", rank " << rank;
      ++(may_go_on[rank] ? without : with);
    }
  }
  EXPECT_GT(with, 500);
  EXPECT_GT(without, 500);
}

}  // namespace
}  // namespace tessera::wait_graph_test
