// Groups of some of the ranks.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/backends.h"
#include "tests/support/reference.h"

namespace tessera::split_test {
using namespace internal;
namespace {

using namespace testing_support;

TEST(Split, RanksOfOneColorAreAGroupInOrderOfKey) {
  for (int world : {1, 2, 3, 4, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      const int rank = comm->rank();
      auto part = comm->split(rank % 2, /*key=*/-rank);  // reverses the order of the ranks
      const int members = (world + 1 - rank % 2) / 2;
      ASSERT_EQ(part->size(), members);
      EXPECT_EQ(part->rank(), members - 1 - rank / 2);
      at::Tensor all = torch::empty({members}, at::kLong);
      part->all_gather(all, torch::tensor({rank})).wait();
      for (int i = 0; i < members; ++i) EXPECT_EQ(all[i].item<int64_t>(), rank % 2 + 2 * (members - 1 - i));
      auto none = comm->split(rank == 0 ? 0 : -1);
      EXPECT_EQ(none == nullptr, rank != 0);
      comm->barrier();  // the parent group still works
    });
  }
}

TEST(Split, TrafficCountsInTheWholeGroupToo) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    auto part = comm->split(comm->rank() / 2)->split(0);
    const auto before = comm->traffic();
    part->all_reduce(torch::ones({1000})).wait();
    EXPECT_EQ(part->traffic().sent_bytes, 4000);
    EXPECT_EQ(comm->traffic().sent_bytes - before.sent_bytes, 4000);
    EXPECT_EQ(comm->traffic().collectives - before.collectives, 1);
  });
}

// Rank 3 fails; rank 2 waits for it in a part, and ranks 0 and 1 wait for each other's part.
TEST(Split, AFailureReachesEveryPartAndSaysWhere) {
  std::atomic<int> told = 0;
  const std::string error = error_of<std::runtime_error>([&] {
    on_ranks(4, [&](std::shared_ptr<Communicator> comm) {
      auto row = comm->split(comm->rank() / 2);
      auto column = comm->split(comm->rank() % 2);
      if (comm->rank() == 3) throw std::runtime_error("rank 3 runs out of luck");
      const std::string lost = error_of<CommError>([&] {
        (comm->rank() == 2 ? row : column)->all_reduce(torch::ones({10}), ReduceOp::kSum, "a test").wait();
        row->all_reduce(torch::ones({10}), ReduceOp::kSum, "a test").wait();
      });
      if (comm->rank() == 0) {
        expect_contains(lost, "in the group of ranks 0, 2 of 4");
      } else {
        expect_contains(lost, "rank 3 runs out of luck");
      }
      ++told;
      throw std::runtime_error(lost);
    });
  });
  EXPECT_EQ(error, "rank 3 runs out of luck");
  EXPECT_EQ(told, 3);
}

// Another operation of one rank ends the split of the others soon, with an error that names it.
void expect_a_split_ends_soon(int world, const std::function<void(Communicator&)>& rank_1, const std::string& reason) {
  for (const bool is_by_function : {false, true}) {
    std::vector<std::string> errors(world);
    const auto began = std::chrono::steady_clock::now();
    error_of<std::exception>([&] {
      run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        comm->barrier();
        if (comm->rank() == 1) return rank_1(*comm);
        errors[comm->rank()] =
            error_of<std::exception>([&] { is_by_function ? comm->split_by([](int) { return 0; }) : comm->split(0); });
        throw std::runtime_error(errors[comm->rank()]);
      });
    });
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60)) << "of a timeout of 10 minutes";
    for (int rank = 0; rank < world; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank) + ": " + errors[rank]);
      if (rank != 1) expect_contains(errors[rank], reason);
      if (rank != 1) expect_contains(errors[rank], "the colors of a split");
      EXPECT_EQ(errors[rank].find("HashStore.cpp"), std::string::npos);
    }
  }
}

TEST(Split, ARankThatDoesNotComeEndsItByName) {
  for (int world : {2, 3, 5}) {
    expect_a_split_ends_soon(world, [](Communicator&) { throw std::runtime_error("mine"); }, "rank 1 failed: mine");
    expect_a_split_ends_soon(world, [](Communicator&) {}, "rank 1");
    expect_a_split_ends_soon(world, [](Communicator& comm) { comm.abort("enough"); }, "rank 1 failed: enough");
    expect_a_split_ends_soon(
        world, [](Communicator& comm) { comm.all_reduce(torch::ones({5}), ReduceOp::kSum, "a loss").wait(); },
        "all-reduce of a loss");
  }
}

TEST(Split, RanksThatDisagreeAboutAColorAreTold) {
  const std::string error = error_of<std::invalid_argument>([] {
    run_ranks(4, [](std::shared_ptr<Communicator> comm) {
      const bool is_odd = comm->rank() == 1;
      comm->split_by([&](int rank) { return is_odd ? rank % 2 : rank / 2; });
    });
  });
  expect_contains(error, "the ranks disagree about the colors of a split: rank 0 has 'color 0 of rank 1', rank 1 has ");
  expect_contains(error, "rank 1 has 'color 1 of rank 1'");
}

// Unlike in split(), where such a rank is in no group.
TEST(Split, NegativeColorsOfAFunctionAreRefused) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    expect_contains(error_of<std::invalid_argument>([&] { comm->split_by([](int rank) { return -rank; }); }),
                    "split_by: color -1 of rank 1, expected 0 or more");
    comm->barrier();
  });
}

// A store that keeps one rank out of every part.
class StoreWithoutParts : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  int64_t add(const std::string& key, int64_t value) override {
    if (key.find("split") != std::string::npos) throw std::runtime_error("no room for parts");
    return PrefixStore::add(key, value);
  }
};

// All ranks have called the split, and one then cannot join.
TEST(Split, ARankThatCannotJoinItsPartEndsTheOthersJoining) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(3);
  const auto began = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 3; ++rank)
      threads.emplace_back([&, rank] {
        c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::PrefixStore>("group", shared);
        if (rank == 1) store = c10::make_intrusive<StoreWithoutParts>("group", shared);
        const auto comm = make_gloo_communicator(
            store, rank, 3, {.address = "127.0.0.1", .timeout = std::chrono::minutes(5), .serves_store = rank == 0});
        errors[rank] = error_of<CommError>([&] { comm->split_by([](int) { return 0; }); });
      });
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60)) << "of a timeout of 5 minutes";
  expect_contains(errors[1], "could not join the group within 300 s: no room for parts");
  for (int rank : {0, 2})
    expect_contains(errors[rank], "joining the groups of a split failed on rank " + std::to_string(rank) +
                                      " of 3: rank 1 failed: " + errors[1]);
}

// Returns the errors of `world` ranks. Fails if the ranks wait for the timeout of 10 minutes.
std::vector<std::string> errors_of_waits(int world, const std::function<void(Communicator&)>& program,
                                         const InitOptions& options = {}) {
  std::vector<std::string> errors(world);
  const auto began = std::chrono::steady_clock::now();
  error_of<std::exception>([&] {
    run_ranks(
        world,
        [&](std::shared_ptr<Communicator> comm) {
          errors[comm->rank()] = error_of<CommError>([&] { program(*comm); });
          if (!errors[comm->rank()].empty()) throw std::runtime_error(errors[comm->rank()]);
        },
        options);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60)) << "of a timeout of 10 minutes";
  return errors;
}

void add_up(Communicator& comm, const char* what) { comm.all_reduce(torch::ones({5}), ReduceOp::kSum, what).wait(); }

// Each group by itself looks fine: its ranks wait in one operation, for a rank that may still join.
TEST(Split, RanksThatWaitForEachOtherInDifferentGroupsAreTold) {
  const auto errors = errors_of_waits(4, [](Communicator& comm) {
    const auto part = comm.split_by([](int rank) { return rank / 2; });
    for (int i = 0; i < 2; ++i) add_up(*part, "a metric");
    add_up(comm.rank() == 3 ? *part : comm, comm.rank() == 3 ? "a metric" : "a loss");
  });
  for (const std::string& error : errors) {
    SCOPED_TRACE(error);
    expect_contains(error, "ranks wait for each other in different groups: rank ");
    expect_contains(error, "rank 2 in operation #2, all-reduce of a loss (5 elements) in the group of all 4 ranks");
    expect_contains(error,
                    "rank 3 in operation #2, all-reduce of a metric (5 elements) in the group of ranks 2, 3 of 4");
  }
}

// The threads' operations look alike, so only the check for a single thread can detect the mix.
TEST(Split, TwoThreadsOfOneGroupAreRefused) {
  for (const bool splits : {false, true}) {
    for (const bool peer_memory : {true, false}) {
      for (int time = 0; time < (splits ? 1 : 20); ++time) {
        std::vector<std::string> seconds(3);
        const auto errors = errors_of_waits(3,
                                            [&](Communicator& comm) {
                                              const auto adds_up = [&](Communicator& group) {
                                                for (int i = 0; i < (splits ? 300 : 30000); ++i)
                                                  group.all_reduce(torch::ones({1000})).wait();
                                              };
                                              const auto part = splits ? comm.split(0) : nullptr;
                                              std::jthread second([&] {
                                                seconds[comm.rank()] =
                                                    error_of<CommError>([&] { adds_up(splits ? *part : comm); });
                                              });
                                              adds_up(comm);
                                            },
                                            {.peer_memory = peer_memory});
        for (int rank = 0; rank < 3; ++rank)
          for (const std::string& error : {errors[rank], seconds[rank]}) {
            EXPECT_EQ(error.empty(), splits) << error;
            expect_contains(error, splits ? "" : "another thread is in a call of this communicator");
          }
      }
    }
  }
}

// The abort may hit the loop before an operation, in a wait, or between two.
TEST(Split, AnotherThreadMayAbortAtAnyTime) {
  for (const bool peer_memory : {true, false}) {
    for (int time = 0; time < 60; ++time) {
      const int64_t numel = std::vector<int64_t>{5, 100'000, 1'000'000}[time % 3];
      const auto errors =
          errors_of_waits(3,
                          [&](Communicator& comm) {
                            std::jthread other;
                            if (comm.rank() == time % 2)
                              other = std::jthread([&] {
                                std::this_thread::sleep_for(std::chrono::microseconds(137 * (time % 29)));
                                comm.abort("a key was pressed");
                              });
                            for (;;) comm.all_reduce(torch::ones({numel})).wait();
                          },
                          {.peer_memory = peer_memory});
      for (const std::string& error : errors) expect_contains(error, "a key was pressed");
    }
  }
}

// Rank 3 has started another operation than ranks 0 to 2, and waits in its part.
TEST(Split, ARankThatHasDivergedAndWaitsInAnotherGroupIsTold) {
  InitOptions options;
  options.timeout = std::chrono::seconds(30);
  const auto errors = errors_of_waits(
      4,
      [](Communicator& comm) {
        const auto part = comm.split_by([](int rank) { return rank / 2; });
        if (comm.rank() < 3) return add_up(comm, "a loss");
        const at::Tensor norm = torch::ones({5});
        const Pending ahead = comm.all_reduce(norm, ReduceOp::kSum, "a norm");
        add_up(*part, "a metric");
      },
      options);
  for (const std::string& error : errors) {
    SCOPED_TRACE(error);
    expect_contains(error, "the ranks have diverged: operation #");
    expect_contains(error, "all-reduce of a norm");
    expect_contains(error, "on rank 3, but all-reduce of a loss");
  }
}

// The groups are rows and columns of a grid: no two of the four form a cycle.
TEST(Split, ACycleOfFourGroupsIsTold) {
  const auto errors = errors_of_waits(4, [](Communicator& comm) {
    const auto row = comm.split_by([](int rank) { return rank / 2; });
    const auto column = comm.split_by([](int rank) { return rank % 2; });
    const bool is_in_row = comm.rank() == 0 || comm.rank() == 3;  // 0 waits for 1, 1 for 3, 3 for 2, and 2 for 0
    add_up(is_in_row ? *row : *column, "a test");
  });
  int tellers = 0;
  for (const std::string& error : errors) {
    EXPECT_FALSE(error.empty());
    const auto begins = error.find("ranks wait for each other in different groups: ");
    if (begins == std::string::npos) continue;
    ++tellers;
    for (const char* part : {"of ranks 0, 1 of 4", "of ranks 1, 3 of 4", "of ranks 2, 3 of 4", "of ranks 0, 2 of 4"})
      expect_contains(error.substr(begins), part);
  }
  EXPECT_GE(tellers, 1);
}

// Long waits in several groups, in one order, or by separate threads as in an asynchronous save, all end.
TEST(Split, WaitsInSeveralGroupsThatEndAreNoCycle) {
  const auto errors = errors_of_waits(3, [](Communicator& comm) {
    const auto pair = comm.split(comm.rank() == 0 ? -1 : 0);
    const auto savers = comm.split(0);
    add_up(comm, "before");
    add_up(*savers, "before");
    const auto pause = [] { std::this_thread::sleep_for(std::chrono::seconds(3)); };
    // Rank 1 waits for rank 0, rank 2 for rank 1.
    if (comm.rank() == 0) pause();
    add_up(comm, "a loss");
    if (pair) add_up(*pair, "a metric");
    // Rank 0's loop waits for rank 1's, whose saver waits for rank 0's.
    std::jthread saver([&, rank = comm.rank()] {
      if (rank == 0) pause();
      add_up(*savers, "a save");
    });
    if (comm.rank() == 1) pause();
    add_up(comm, "a loss");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// The program makes threads for each epoch, so thread ids are reused; or its threads exchange their groups.
TEST(Split, ThreadsThatHandOverTheirGroupsAreNoCycle) {
  for (const bool is_new : {true, false}) {
    const auto errors = errors_of_waits(2, [&](Communicator& comm) {
      const auto first = comm.split(0), second = comm.split(0);
      const int rank = comm.rank();
      // Each rank's only thread is late in the group in which the other rank waits.
      const auto run = [&](Communicator& group, int late) {
        if (rank == late) std::this_thread::sleep_for(std::chrono::seconds(3));
        add_up(group, "a test");
      };
      const auto both = [&](Communicator& a, Communicator& b, int late_in_a, int late_in_b) {
        std::jthread one([&] { run(a, late_in_a); }), other([&] { run(b, late_in_b); });
      };
      if (is_new) {
        both(*first, *second, -1, -1);
        both(*second, *first, 0, 1);
      } else {
        std::barrier<> meet(2);
        std::jthread one([&] { run(*first, -1), meet.arrive_and_wait(), run(*second, 0); });
        std::jthread other([&] { run(*second, -1), meet.arrive_and_wait(), run(*first, 1); });
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

// The groups of the cycle are broken, and the others are intact.
TEST(Split, AGroupGoesOnAfterACycleOfOthers) {
  const auto errors = errors_of_waits(2, [](Communicator& comm) {
    const auto first = comm.split(0), second = comm.split(0);
    const std::string error = error_of<CommError>([&] { add_up(comm.rank() == 0 ? *first : *second, "a test"); });
    expect_contains(error, "ranks wait for each other in different groups: ");
    if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::seconds(3));
    add_up(comm, "a loss");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// Rank 1's loop may still join, so there is no cycle. The timeout names the wait of its other thread.
TEST(Split, ATimeoutSaysThatARankWaitsInAnotherGroup) {
  std::vector<std::string> errors(2);
  error_of<std::exception>([&] {
    run_ranks(2,
              [&](std::shared_ptr<Communicator> comm) {
                const auto part = comm->split(0);
                comm->barrier();
                const int rank = comm->rank();
                std::jthread other;
                const auto pause = [](int seconds) { std::this_thread::sleep_for(std::chrono::seconds(seconds)); };
                if (rank == 1)
                  other = std::jthread([&] {
                    pause(1);  // its timeout is later than that of rank 0
                    error_of<CommError>([&] { add_up(*part, "a metric"); });
                  });
                if (rank == 1) pause(4);
                errors[rank] = error_of<CommError>([&] { add_up(*comm, "a loss"); });
                throw std::runtime_error(errors[rank]);
              },
              {.timeout = std::chrono::seconds(3)});
  });
  expect_contains(
      errors[0],
      "timed out after 3 s waiting for rank 1; waiting in another group: rank 1 in operation #0, all-reduce "
      "of a metric (5 elements) in the group of ranks 0, 1 of 2");
}

}  // namespace
}  // namespace tessera::split_test
