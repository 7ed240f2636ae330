// The store calls of a watchdog during long waits.
#include "core/comm/watchdog/watchdog.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace tessera::watchdog_test {
using namespace internal;
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Counts its calls, and does not answer while it is stopped.
class CountingStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override { call(), HashStore::set(key, value); }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return call(), HashStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override { return call(), HashStore::get(key); }
  int64_t add(const std::string& key, int64_t value) override { return call(), HashStore::add(key, value); }
  bool check(const std::vector<std::string>& keys) override { return call(), HashStore::check(keys); }
  bool deleteKey(const std::string& key) override { return call(), HashStore::deleteKey(key); }

  std::atomic<int64_t> calls = 0;
  std::shared_future<void> continues;

 private:
  void call() {
    ++calls;
    if (continues.valid()) continues.wait();
  }
};

struct Rank {
  Rank(const c10::intrusive_ptr<CountingStore>& store, int rank, int size)
      : watch(store, rank, size, {.interrupt = [this] { ++interrupts; }}) {}
  std::atomic<int> interrupts = 0;
  Watchdog watch;
};

template <class Holds>
bool soon(Holds holds) {
  const auto end = Clock::now() + 20s;
  while (!holds() && Clock::now() < end) std::this_thread::sleep_for(20ms);
  return holds();
}

TEST(Watchdog, AsksTheStoreAsOftenWithManyRanksAsWithFew) {
  constexpr int kRanks = 256;
  auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(std::make_unique<Rank>(store, rank, kRanks));
  for (const auto& rank : ranks) {
    for (int i = 0; i < 64; ++i) rank->watch.started(i, "all-gather of unit " + std::to_string(i));
    rank->watch.begin_wait();
  }
  std::this_thread::sleep_for(1500ms);
  const auto began = Clock::now();
  const int64_t before = store->calls;
  std::this_thread::sleep_for(2s);
  const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
  const double calls = static_cast<double>(store->calls - before) / seconds / kRanks;
  RecordProperty("calls_a_second_and_rank", std::to_string(calls));
  EXPECT_LE(calls, 10);
  EXPECT_GE(calls, 1);

  // A rank that does not wait is found among many, and a rank that fails ends all waits.
  ranks[77]->watch.end_wait();
  EXPECT_TRUE(soon([&] {
    return ranks[0]->watch.waiting_ranks().starts_with(
        "not waiting for any operation: rank 77; waiting as well: ranks 1, 2");
  }));
  ranks[77]->watch.publish_failure("no more data");
  for (const auto& rank : ranks) EXPECT_TRUE(rank == ranks[77] || soon([&] { return rank->interrupts > 0; }));
  EXPECT_EQ(ranks[200]->watch.explanation(), "rank 77 failed: no more data");
  // An error that follows from another rank's failure is not published as a reason.
  ranks[200]->watch.publish_failure("the all-gather failed");
  EXPECT_EQ(ranks[77]->watch.explanation(), "rank 77 failed: no more data");
}

TEST(Watchdog, FindsWhoDiverged) {
  auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(std::make_unique<Rank>(store, rank, 3));
  for (int rank : {2, 1, 0}) {
    ranks[rank]->watch.started(4, "all-gather of unit 'a'");
    ranks[rank]->watch.started(5, rank == 1 ? "barrier" : "all-gather of unit 'b'");
    ranks[rank]->watch.begin_wait();
  }
  ASSERT_TRUE(soon([&] { return ranks[0]->interrupts + ranks[1]->interrupts + ranks[2]->interrupts > 0; }));
  for (const auto& rank : ranks) {
    const std::string text = rank->watch.explanation();
    if (text.empty()) continue;
    EXPECT_NE(text.find("the ranks have diverged: operation #5 is "), std::string::npos) << text;
    EXPECT_NE(text.find("barrier on rank 1"), std::string::npos) << text;
    rank->watch.publish_failure(text);
  }
  for (const auto& rank : ranks) EXPECT_TRUE(soon([&] { return rank->interrupts > 0; }));
}

// A rank that has left is awaited no longer; operations that it took part in can still complete.
TEST(Watchdog, ARankThatLeavesIsMissedInWhatItHasNotStarted) {
  auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.push_back(std::make_unique<Rank>(store, rank, 4));
  for (int rank : {0, 1, 2, 3})
    for (int i = 0; i < 3 - (rank == 1 ? 1 : 0); ++i)
      ranks[rank]->watch.started(i, "all-gather of unit " + std::to_string(i));
  ranks[2].reset();
  ranks[3]->watch.begin_wait();
  std::this_thread::sleep_for(2500ms);
  EXPECT_EQ(ranks[3]->interrupts, 0) << "rank 2 has started all that rank 3 has";
  const auto began = Clock::now();
  ranks[0]->watch.begin_wait();
  ranks[1].reset();
  for (int rank : {0, 3}) {
    EXPECT_TRUE(soon([&] { return ranks[rank]->interrupts > 0; }));
    EXPECT_EQ(ranks[rank]->watch.explanation(),
              "rank 1 has left the group, and takes no part in operation #2, all-gather of unit 2");
  }
  EXPECT_LT(Clock::now() - began, 3s);
}

// The transport's report ends the wait, with or without the store; the reason of a failed rank takes precedence.
TEST(Watchdog, AsksTheTransportFirst) {
  for (const bool is_told : {false, true}) {
    auto store = c10::make_intrusive<CountingStore>();
    std::atomic<int> interrupts = 0;
    Watchdog watch(
        store, 0, 2,
        {.interrupt = [&] { ++interrupts; }, .why_disconnected = [] { return "the connection to rank 1 is closed"; }});
    if (is_told) store->set("tessera/failure/1", std::vector<uint8_t>{'w', 'h', 'y'});
    watch.begin_wait();
    EXPECT_TRUE(soon([&] { return interrupts > 0; }));
    EXPECT_EQ(watch.explanation(), is_told ? "why" : "the connection to rank 1 is closed");
  }
}

// The store lives in rank 0's process, which waits for readers and for ranks that leave.
TEST(Watchdog, TellsThoseThatDoNotWaitBeforeTheStoreGoes) {
  for (const bool fails : {true, false}) {
    auto store = c10::make_intrusive<CountingStore>();
    auto server =
        std::make_unique<Watchdog>(store, 0, 3, Watchdog::Callbacks{[] {}}, Watchdog::Options{.serves_store = true});
    Rank idle(store, 1, 3);
    auto leaves = std::make_unique<Rank>(store, 2, 3);
    const auto began = Clock::now();
    if (fails) server->publish_failure("no more data");
    leaves.reset();
    fails ? server->await_readers() : server.reset();
    EXPECT_LT(Clock::now() - began, Watchdog::kReaders - 500ms) << "none of them was waited for in vain";
    const int64_t calls = store->calls;
    EXPECT_EQ(idle.watch.explanation(), fails ? "rank 0 failed: no more data" : "");
    EXPECT_EQ(idle.watch.store_failure(), fails ? "" : "rank 0, whose process has the store, has left the group");
    EXPECT_EQ(store->calls, calls) << "it knows";
  }
}

// No rank reads, as if the others had died.
TEST(Watchdog, OnlyAGroupThatHasFailedWaitsLongForReaders) {
  for (const bool fails : {false, true}) {
    auto store = c10::make_intrusive<CountingStore>();
    auto server =
        std::make_unique<Watchdog>(store, 0, 3, Watchdog::Callbacks{[] {}}, Watchdog::Options{.serves_store = true});
    if (fails) Rank(store, 1, 3).watch.publish_failure("no more data");  // the server has not seen it
    const auto began = Clock::now();
    server.reset();
    const auto took = Clock::now() - began;
    EXPECT_EQ(took > Watchdog::kReaders - 200ms, fails);
    EXPECT_EQ(took < 1s, !fails);
  }
}

TEST(Watchdog, WaitsForNoStoreThatHasStopped) {
  auto store = c10::make_intrusive<CountingStore>();
  std::promise<void> continues;
  store->continues = continues.get_future().share();
  const auto began = Clock::now();
  {
    Rank rank(store, 1, 2);
    rank.watch.begin_wait();
    std::this_thread::sleep_for(1500ms);  // its thread calls the store now
    EXPECT_EQ(rank.watch.explanation(), "");
    EXPECT_EQ(rank.watch.waiting_ranks(), "");
    EXPECT_EQ(rank.watch.store_failure(), "the store, in rank 0's process or the launcher's, does not answer");
    rank.watch.publish_failure("timed out");
  }
  EXPECT_LT(Clock::now() - began, 8s);
  continues.set_value();
  EXPECT_TRUE(soon([&] { return store.use_count() == 1; }));  // the detached threads have ended
}

}  // namespace
}  // namespace tessera::watchdog_test
