// The parts of a Watchdog, without its thread.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "core/comm/watchdog/group_failure.h"
#include "core/comm/watchdog/group_news.h"
#include "core/comm/watchdog/heartbeat.h"
#include "core/comm/watchdog/stall_search.h"
#include "core/comm/watchdog/started_operations.h"
#include "core/comm/watchdog/watchdog_loop.h"

namespace tessera::watchdog_parts_test {
using namespace internal;
namespace {

using namespace std::chrono_literals;
using Operations = std::deque<StartedOperation>;

c10::intrusive_ptr<c10d::Store> new_store() { return c10::make_intrusive<c10d::HashStore>(); }

TEST(StartedOperations, KeepsTheLastOnes) {
  StartedOperations operations;
  EXPECT_EQ(operations.progress().started_count, 0);
  for (uint64_t i = 0; i <= StartedOperations::kMostRecent; ++i) operations.add(i, "operation " + std::to_string(i));
  const auto recent = operations.recent();
  ASSERT_EQ(recent.size(), StartedOperations::kMostRecent);
  EXPECT_EQ(recent.front().description, "operation 1");
  EXPECT_EQ(operations.progress().started_count, StartedOperations::kMostRecent + 1);
}

TEST(StartedOperations, ProgressNamesTheStartingThreadUnlessThereAreSeveral) {
  StartedOperations operations;
  operations.add(0, "a");
  EXPECT_EQ(operations.progress().thread, thread_number());
  std::thread([&] { operations.add(1, "b"); }).join();
  EXPECT_EQ(operations.progress().thread, 0);
}

TEST(StartedOperations, AWaitIsAStallAfterASecond) {
  StartedOperations operations;
  operations.add(7, "all-reduce");
  operations.begin_wait(7);
  EXPECT_FALSE(operations.is_stalled());
  EXPECT_FALSE(operations.long_wait());
  std::this_thread::sleep_for(StartedOperations::kStallsAfter + 10ms);
  EXPECT_TRUE(operations.is_stalled());
  const auto wait = operations.long_wait();
  ASSERT_TRUE(wait);
  EXPECT_EQ(wait->sequence, 7);
  EXPECT_EQ(wait->operation, "all-reduce");
  operations.end_wait();
  EXPECT_FALSE(operations.is_stalled());
}

TEST(StartedOperations, ActsOnlyDuringAWait) {
  StartedOperations operations;
  int acts = 0;
  EXPECT_FALSE(operations.if_waiting([&] { ++acts; }));
  operations.begin_wait({});
  EXPECT_TRUE(operations.if_waiting([&] { ++acts; }));
  EXPECT_EQ(acts, 1);
}

TEST(GroupFailure, TheFirstExplanationCounts) {
  GroupFailure failure;
  EXPECT_FALSE(failure.has_failed());
  failure.explain("first", /*is_published=*/false);
  failure.explain("second", /*is_published=*/false);
  EXPECT_EQ(failure.explanation(), "first");
  EXPECT_TRUE(failure.has_failed());
}

TEST(GroupFailure, ARankPublishesOnceAndNotWhatAllKnow) {
  GroupFailure own, others, lost;
  EXPECT_TRUE(own.begin_publishing());
  EXPECT_FALSE(own.begin_publishing());
  others.explain("rank 1 failed", /*is_published=*/true);
  EXPECT_FALSE(others.begin_publishing());
  lost.set_store_failure("no answer");
  EXPECT_FALSE(lost.begin_publishing());
  EXPECT_TRUE(lost.has_failed());
}

TEST(GroupNews, FailuresAreReadInTheirOrder) {
  const auto store = new_store();
  GroupNews first(store, 0, 3, /*serves_store=*/true), second(store, 1, 3, false), third(store, 2, 3, false);
  EXPECT_EQ(third.read_failures(), "");
  EXPECT_FALSE(third.has_news());
  second.publish_failure("no disk");
  first.publish_failure("no memory");
  EXPECT_TRUE(third.has_news());
  EXPECT_EQ(third.read_failures(), "rank 1 failed: no disk; rank 0 failed: no memory");
}

TEST(GroupNews, TheLeaverIsTheRankThatStartedTheFewestOperations) {
  const auto store = new_store();
  GroupNews first(store, 0, 3, true), second(store, 1, 3, false), third(store, 2, 3, false);
  const auto whole = [] { return false; };
  EXPECT_FALSE(first.find_leaver());
  first.say_left(5, whole);
  second.say_left(3, whole);
  third.say_left(4, whole);
  const auto leaver = first.find_leaver();
  ASSERT_TRUE(leaver);
  EXPECT_EQ(leaver->rank, 1);
  EXPECT_EQ(leaver->started_count, 3);
}

TEST(GroupNews, NoRankLeavesAFailedGroup) {
  const auto store = new_store();
  GroupNews news(store, 1, 2, false);
  news.say_left(3, [] { return true; });
  EXPECT_FALSE(news.find_leaver());
  EXPECT_TRUE(news.has_said_informed());
}

TEST(GroupNews, TheServerWaitsForItsReaders) {
  const auto store = new_store();
  GroupNews server(store, 0, 2, true), reader(store, 1, 2, false);
  const auto began = std::chrono::steady_clock::now();
  server.await_readers(/*has_failed=*/false, 50ms, 10s);
  EXPECT_GE(std::chrono::steady_clock::now() - began, 50ms);
  EXPECT_TRUE(reader.has_news());  // the store will end
  reader.say_informed();
  server.await_readers(/*has_failed=*/true, 10s, 60s);
  EXPECT_LT(std::chrono::steady_clock::now() - began, 10s);
}

TEST(Heartbeat, ASilentRankIsNamedDuringAStall) {
  const auto store = new_store();
  Heartbeat own(store, 0, 2, 250ms), next(store, 1, 2, 250ms);
  EXPECT_TRUE(own.is_due());
  for (int i = 0; i < 2 * Heartbeat::kBeatsMissed; ++i) {
    next.beat(false);
    EXPECT_EQ(own.beat(true), "");
  }
  EXPECT_FALSE(own.is_due());
  std::string dead;
  int beats = 0;
  for (; dead.empty() && beats < 100; ++beats) dead = own.beat(true);
  EXPECT_EQ(beats, Heartbeat::kBeatsMissed);
  EXPECT_NE(dead.find("rank 1 has given no sign of life for 2.5 s"), std::string::npos) << dead;
}

TEST(Heartbeat, IsOffWithoutAnInterval) { EXPECT_FALSE(Heartbeat(new_store(), 0, 2, 0ms).is_due()); }

TEST(StallSearch, RanksThatStartedOtherOperationsHaveDiverged) {
  const Operations own{{4, "all-gather of a"}, {5, "all-gather of b"}};
  EXPECT_EQ(divergence_text(1, own, published_text(0, own)), "");
  EXPECT_EQ(divergence_text(1, own, published_text(0, {{5, "all-gather of c"}})),
            "the ranks have diverged: operation #5 is all-gather of b on rank 1, but all-gather of c on rank 0");
  EXPECT_EQ(divergence_text(1, own, published_text(0, {{6, "all-gather of d"}})), "");
}

// A group of two ranks in one store.
struct Rank {
  Rank(const c10::intrusive_ptr<c10d::Store>& store, int rank)
      : place{std::make_shared<WaitRegistry>(store, rank, 2), "", {}},
        news(store, rank, 2, rank == 0),
        search(store, rank, news, place) {}
  const WaitRegistry::Place place;
  GroupNews news;
  StallSearch search;
};

TEST(StallSearch, FindsPublishedFailuresBeforeADivergence) {
  const auto store = new_store();
  Rank first(store, 0), second(store, 1);
  EXPECT_EQ(first.search.find_failure_or_divergence({{0, "a"}}).text, "");
  const auto diverged = second.search.find_failure_or_divergence({{0, "b"}});
  EXPECT_NE(diverged.text.find("the ranks have diverged: operation #0 is b on rank 1"), std::string::npos);
  EXPECT_FALSE(diverged.is_published);
  first.news.publish_failure("no disk");
  const auto failed = second.search.find_failure_or_divergence({{0, "b"}});
  EXPECT_EQ(failed.text, "rank 0 failed: no disk");
  EXPECT_TRUE(failed.is_published);
}

TEST(StallSearch, ALeaverIsMissedByItsFirstAbsentOperation) {
  const auto store = new_store();
  Rank first(store, 0), second(store, 1);
  second.news.say_left(1, [] { return false; });
  EXPECT_EQ(first.search.find_leaver({{0, "a"}, {1, "b"}}),
            "rank 1 has left the group, and takes no part in operation #1, b");
}

TEST(StallSearch, RanksAreStalledBetweenTheirFirstSearchAndItsEnd) {
  const auto store = new_store();
  Rank first(store, 0), second(store, 1);
  first.search.find_failure_or_divergence({});
  EXPECT_EQ(ranks_not_stalled(*store, {0, 1}), (std::vector<int>{1}));
  EXPECT_TRUE(first.search.is_active());
  first.search.end();
  EXPECT_FALSE(first.search.is_active());
  EXPECT_EQ(ranks_not_stalled(*store, {0, 1}), (std::vector<int>{0, 1}));
}

TEST(LoopControl, StopEndsASleepAndReportsALoopThatDoesNotEnd) {
  LoopControl control;
  std::thread loop([&] {
    while (control.sleep(60s)) {
    }
    control.end_loop();
  });
  EXPECT_TRUE(control.stop(60s));
  loop.join();
  LoopControl stuck;
  stuck.begin_calls();
  EXPECT_FALSE(stuck.stop(10ms));
  EXPECT_GE(stuck.unanswered(), 10ms);
  stuck.end_calls();
  EXPECT_EQ(stuck.unanswered(), 0ms);
}

}  // namespace
}  // namespace tessera::watchdog_parts_test
