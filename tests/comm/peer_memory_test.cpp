// Messages between memories of threads, and of processes that may die.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/comm/backends.h"
#include "core/comm/shared_memory/peer_memory.h"
#include "core/comm/shared_memory/published_memory.h"
#include "tests/comm/on_processes.h"
#include "tests/support/temporary_folder.h"

namespace tessera::peer_memory_test {
using namespace internal;
namespace {

using namespace std::chrono_literals;
using testing_support::on_processes;
using Outcome = PeerMemory::Outcome;

constexpr int64_t kLargeNumel = PeerMemory::kAtOnceBytes / sizeof(float) + 1;

// Runs the body on two ranks that are threads of this process. Uses no intra-operator threads, which forked processes
// would miss later.
void on_two_threads(const std::function<void(PeerMemory&, int rank)>& body, std::chrono::milliseconds timeout = 20s) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto rank_main = [&](int rank) {
    at::set_num_threads(1);
    auto memory = PeerMemory::connect(*store, rank, 2, timeout, true);
    ASSERT_NE(memory, nullptr);
    body(*memory, rank);
  };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
}

void meet(c10d::Store& store, const std::string& where) {
  if (store.add(where, 1) == 2) store.set(where + "/all", std::string("yes"));
  store.wait({where + "/all"});
}

void put(c10d::Store& store, const std::string& key, const std::string& text = "yes") { store.set(key, text); }
std::string read(c10d::Store& store, const std::string& key) { return store.get_to_str(key); }

// Counts the values that a rank reads from the store.
class CountingStore : public c10d::PrefixStore {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("counted", std::move(store)) {}
  std::vector<uint8_t> get(const std::string& key) override {
    ++reads;
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    reads += keys.size();
    return PrefixStore::multiGet(keys);
  }
  size_t reads = 0;
};

// Simulates two hosts: one rank of the first takes part, and three of the second.
TEST(PeerMemory, ARankReadsOfItsOwnHostAlone) {
  constexpr int kRanks = 12, kShared = 3;
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      CountingStore store(shared);
      const auto memory = PeerMemory::connect(store, rank, kRanks, 20s, /*is_wanted=*/rank % 4 == 1);
      EXPECT_EQ(memory != nullptr, rank % 4 == 1);
      if (!memory) {
        EXPECT_EQ(store.reads, 0U) << rank;
      } else {
        EXPECT_LE(store.reads, 4 * kShared + 1U) << rank;
        for (int peer = 0; peer < kRanks; ++peer) EXPECT_EQ(memory->reaches(peer), peer % 4 == 1) << peer;
      }
    });
  for (std::thread& rank : ranks) rank.join();
}

TEST(PeerMemory, TagsMeetInAnyOrderWhoeverComesFirst) {
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    const int peer = 1 - rank;
    for (const int first : {0, 1}) {
      std::vector<at::Tensor> mine, theirs;
      std::vector<PeerMemory::Announced> announced;
      for (int i = 0; i < 20; ++i) {
        mine.push_back(torch::full({100 + i}, 100.0 * rank + i));
        theirs.push_back(torch::zeros({100 + i}));
      }
      if (rank != first) std::this_thread::sleep_for(50ms);
      for (int i = 0; i < 20; ++i) {
        const int tag = rank == 0 ? i : 19 - i;  // in opposite orders
        announced.push_back(memory.send(mine[tag], peer, tag));
        announced.push_back(memory.receive(theirs[tag], peer, tag));
      }
      for (const auto& message : announced) EXPECT_EQ(memory.wait(message), Outcome::kDone);
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(theirs[i].eq(100.0 * peer + i).all().item<bool>());
      meet(store, "round " + std::to_string(first));
    }
  });
}

// ---- the copying rank ----------------------------------------------------------------------------

// Each rank has two messages with one tag.
struct Exchange {
  Exchange(PeerMemory& memory, uint64_t tag, int64_t numel)
      : own(torch::full({numel}, 1.0f + memory.rank())), theirs(torch::zeros({numel})) {
    messages.push_back(memory.send(own, 1 - memory.rank(), tag));
    messages.push_back(memory.receive(theirs, 1 - memory.rank(), tag));
  }
  uint64_t bytes() const { return own.nbytes(); }
  void finish(PeerMemory& memory) const {
    for (const auto& message : messages) EXPECT_EQ(memory.wait(message), Outcome::kDone);
    EXPECT_TRUE(theirs.eq(2.0f - memory.rank()).all().item<bool>());
  }

  at::Tensor own, theirs;
  std::vector<PeerMemory::Announced> messages;
};

TEST(PeerMemoryCopies, WhoWaitsCopiesBothForOneThatComputes) {
  c10d::HashStore store;
  for (const int first : {0, 1})
    on_two_threads([&](PeerMemory& memory, int rank) {
      const std::string round = std::to_string(first);
      if (rank != first) store.wait({"first " + round});
      const Exchange exchange(memory, 7, kLargeNumel);
      if (rank == first) put(store, "first " + round);
      meet(store, "announced " + round);
      if (rank == 1) exchange.finish(memory);
      EXPECT_EQ(memory.copied_bytes(), rank == 1 ? 2 * exchange.bytes() : 0);
      meet(store, "copied " + round);
      if (rank == 0) exchange.finish(memory);
      EXPECT_EQ(memory.copied_bytes(), rank == 1 ? 2 * exchange.bytes() : 0);
      meet(store, "over " + round);
    });
}

TEST(PeerMemoryCopies, WhoComesSecondToASmallMessageCopiesAtOnce) {
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    if (rank == 1) store.wait({"first"});
    const Exchange exchange(memory, 7, PeerMemory::kAtOnceBytes / sizeof(float));
    if (rank == 0) put(store, "first");
    EXPECT_EQ(memory.copied_bytes(), rank == 1 ? 2 * exchange.bytes() : 0);
    meet(store, "announced");
    exchange.finish(memory);
    meet(store, "over");
  });
}

// A copy takes so long that the other rank can begin one too, in this round or another.
TEST(PeerMemoryCopies, OfTwoThatWaitEachCopies) {
  constexpr int kRounds = 10;
  c10d::HashStore store;
  std::atomic<bool> is_seen = false;
  on_two_threads([&](PeerMemory& memory, int rank) {
    for (int round = 0; round < kRounds && !is_seen; ++round) {
      const std::string name = std::to_string(round);
      const Exchange exchange(memory, static_cast<uint64_t>(round), 1 << 24);
      const uint64_t before = memory.copied_bytes();
      meet(store, "announced " + name);
      exchange.finish(memory);
      const uint64_t copied = memory.copied_bytes() - before;
      put(store, name + " copied by " + std::to_string(rank), std::to_string(copied));
      meet(store, "over " + name);
      const auto others = std::stoull(read(store, name + " copied by " + std::to_string(1 - rank)));
      EXPECT_EQ(copied + others, 2 * exchange.bytes());
      if (copied > 0 && others > 0) is_seen = true;
      meet(store, "seen " + name);
    }
  });
  EXPECT_TRUE(is_seen);
}

// A waiting rank copies its receives before its sends. Here its sends have no address to go to, so wait() then throws.
TEST(PeerMemoryCopies, WhatIsReceivedComesFirst) {
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    if (rank == 1) store.wait({"first"});
    const Exchange exchange(memory, 7, kLargeNumel);
    if (rank == 0) {
      memory.board()->channel(1, 0).slots[0].receiver.address = 0;
      put(store, "first");
    }
    meet(store, "announced");
    if (rank == 1) {
      EXPECT_THROW((void)memory.wait(exchange.messages[0]), PeerMemory::Unreachable);
      EXPECT_TRUE(exchange.theirs.eq(1.0).all().item<bool>());
    }
    meet(store, "over");
  });
}

// Rank 1 sleeps until its receive completes. Meanwhile it copies its send under another tag of the same operation.
TEST(PeerMemoryCopies, AWaitCopiesWhateverOfItsOperationIsMatchedMeanwhile) {
  constexpr uint64_t kReceived = uint64_t{5} << 32 | 7, kSent = uint64_t{5} << 32 | 9, kLater = uint64_t{6} << 32 | 9;
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    const at::Tensor own = torch::full({kLargeNumel}, 1.0f + rank), theirs = torch::zeros({kLargeNumel}),
                     later = torch::zeros({kLargeNumel});
    if (rank == 1) {
      const auto sent_later = memory.send(own, 0, kLater), sent = memory.send(own, 0, kSent);
      const auto received = memory.receive(theirs, 0, kReceived);
      put(store, "waits");
      EXPECT_EQ(memory.wait(received), Outcome::kDone);
      EXPECT_TRUE(theirs.eq(1.0).all().item<bool>());
      EXPECT_EQ(memory.copied_bytes(), 2 * own.nbytes());
      for (const auto& message : {sent, sent_later}) EXPECT_EQ(memory.wait(message), Outcome::kDone);
      return;
    }
    store.wait({"waits"});
    std::this_thread::sleep_for(20ms);
    const auto expect_done = [](const PeerMemory::Announced& message) {
      ASSERT_NE(message, nullptr);
      const auto until = std::chrono::steady_clock::now() + 20s;
      while (message->slot->state.load() != SharedBoard::kDone && std::chrono::steady_clock::now() < until)
        std::this_thread::yield();
      EXPECT_EQ(message->slot->state.load(), SharedBoard::kDone);
    };
    const auto received_later = memory.receive(later, 1, kLater), received = memory.receive(theirs, 1, kSent);
    expect_done(received);
    EXPECT_TRUE(theirs.eq(2.0).all().item<bool>());
    EXPECT_EQ(received_later->slot->state.load(), SharedBoard::kMatched);
    const auto sent = memory.send(own, 1, kReceived);
    expect_done(sent);
    EXPECT_EQ(memory.copied_bytes(), 0u);
    for (const auto& message : {received, sent, received_later}) EXPECT_EQ(memory.wait(message), Outcome::kDone);
    EXPECT_TRUE(later.eq(2.0).all().item<bool>());
  });
}

// Neither rank waits before it has announced all messages: a rank that finds the channel full copies.
TEST(PeerMemoryCopies, BothRanksMayBeAThousandMessagesAhead) {
  constexpr int kMessages = SharedBoard::Channel::kSlots + 100;
  on_two_threads([&](PeerMemory& memory, int rank) {
    const at::Tensor all = rank == 0 ? torch::ones({1, kLargeNumel}).expand({kMessages, kLargeNumel})
                                     : torch::zeros({kMessages, kLargeNumel});
    std::vector<PeerMemory::Announced> announced;
    for (int i = 0; i < kMessages; ++i)
      announced.push_back(rank == 0 ? memory.send(all[i], 1, i) : memory.receive(all[i], 0, i));
    for (const auto& message : announced) ASSERT_EQ(memory.wait(message), Outcome::kDone);
    EXPECT_TRUE(all.eq(1.0).all().item<bool>());
  });
}

TEST(PeerMemoryCopies, NobodyCopiesWhatBothHadAnnouncedWhenOneLeft) {
  c10d::HashStore store;
  for (const int first : {0, 1})
    for (const bool receives : {true, false})
      on_two_threads([&](PeerMemory& memory, int rank) {
        const std::string round = std::to_string(2 * first + receives);
        const at::Tensor tensor = torch::full({kLargeNumel}, static_cast<float>(rank));
        if (rank != first) store.wait({"first " + round});
        const auto message =
            receives == (rank == 0) ? memory.receive(tensor, 1 - rank, 7) : memory.send(tensor, 1 - rank, 7);
        if (rank == first) put(store, "first " + round);
        meet(store, "announced " + round);
        if (rank == 0) {
          EXPECT_TRUE(memory.close());
        }
        meet(store, "left " + round);
        if (rank == 1) {
          EXPECT_EQ(memory.wait(message), Outcome::kPeerLeft);
        }
        meet(store, "tried " + round);
        EXPECT_TRUE(tensor.eq(static_cast<float>(rank)).all().item<bool>());
      });
}

// Numbers on the board lead only to memory that a rank has announced, for the announced access.
TEST(PeerMemory, NothingOnTheBoardIsFollowedAsAnAddress) {
  c10d::HashStore store;
  const at::Tensor secret = torch::full({8}, 7.0);
  for (const int64_t numel : {int64_t{8}, kLargeNumel})
    for (const uint64_t written : {uint64_t{8}, reinterpret_cast<uint64_t>(secret.const_data_ptr())}) {
      on_two_threads([&](PeerMemory& memory, int rank) {
        at::Tensor x = torch::full({numel}, static_cast<float>(rank));
        const std::string round = std::to_string(numel) + " " + std::to_string(written);
        PeerMemory::Announced announced;
        if (rank == 0) {
          announced = memory.send(x, 1, 5);
          memory.board()->channel(0, 1).slots[0].sender.address = written;
        }
        meet(store, "announced " + round);
        if (rank == 1) {
          EXPECT_THROW(memory.wait(memory.receive(x, 0, 5)), PeerMemory::Unreachable);
          EXPECT_TRUE(x.eq(1.0).all().item<bool>());
        }
        meet(store, "received " + round);
        if (rank == 0) {  // rank 1 is still a member
          EXPECT_THROW(memory.wait(announced), PeerMemory::Unreachable);
        }
        meet(store, "waited " + round);
      });
    }
}

TEST(PublishedMemory, IsFoundForAsLongAsItIs) {
  float data[2] = {};
  std::optional<PublishedMemory> read(std::in_place, data, sizeof(data), /*is_written=*/false);
  PublishedMemory written(data, sizeof(data), /*is_written=*/true);
  EXPECT_NE(read->number(), written.number());
  EXPECT_EQ(PublishedMemory::find(read->number(), sizeof(data), false), data);
  EXPECT_EQ(PublishedMemory::find(written.number(), sizeof(data), true), data);
  EXPECT_THROW(PublishedMemory::find(read->number(), sizeof(data), true), std::runtime_error);
  EXPECT_THROW(PublishedMemory::find(written.number(), sizeof(data) - 1, true), std::runtime_error);
  const uint64_t number = read->number();
  read.reset();
  EXPECT_THROW(PublishedMemory::find(number, sizeof(data), false), std::runtime_error);
  const PublishedMemory moved(std::move(written));
  EXPECT_EQ(PublishedMemory::find(moved.number(), sizeof(data), true), data);
}

TEST(PeerMemory, ARankMayBeThousandsOfMessagesAhead) {
  constexpr int kMessages = 5000;
  on_two_threads([&](PeerMemory& memory, int rank) {
    std::vector<at::Tensor> tensors;
    std::vector<PeerMemory::Announced> announced;
    if (rank == 1) std::this_thread::sleep_for(100ms);
    for (int i = 0; i < kMessages; ++i) {
      tensors.push_back(rank == 0 ? torch::full({3}, 1.0 * i) : torch::zeros({3}));
      announced.push_back(rank == 0 ? memory.send(tensors[i], 1, i) : memory.receive(tensors[i], 0, i));
    }
    for (const auto& message : announced) ASSERT_EQ(memory.wait(message), Outcome::kDone);
    for (int i = 0; i < kMessages; ++i) ASSERT_EQ(tensors[i].sum().item<int>(), 3 * i);
  });
}

TEST(PeerMemory, APeerThatDoesNotComeIsWaitedForOnlySoLong) {
  on_two_threads(
      [](PeerMemory& memory, int rank) {
        if (rank == 1) return std::this_thread::sleep_for(500ms);
        const auto message = memory.receive(torch::zeros({4}), 1, 7);
        EXPECT_EQ(memory.wait(message), Outcome::kTimedOut);
      },
      200ms);
}

// Sends until the channel is full. Returns the text of the error.
std::string send_without_end(PeerMemory& memory) {
  std::vector<at::Tensor> tensors;
  try {
    for (int tag = 0;; ++tag) (void)memory.send(tensors.emplace_back(torch::ones({3})), 1, tag);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(PeerMemory, AFullChannelIsAnErrorWithItsCause) {
  c10d::HashStore store;
  on_two_threads(
      [&](PeerMemory& memory, int rank) {
        if (rank == 0) {
          EXPECT_EQ(send_without_end(memory), "timed out");
        }
        meet(store, "timed out");
      },
      200ms);
  on_two_threads([&](PeerMemory& memory, int rank) {
    if (rank == 0) {
      std::thread interrupter([&] {
        std::this_thread::sleep_for(50ms);
        memory.interrupt();
      });
      EXPECT_EQ(send_without_end(memory), "");
      interrupter.join();
      memory.clear_interrupt();
    }
    meet(store, "interrupted");
    if (rank == 1) {
      memory.close();
    } else {
      EXPECT_EQ(send_without_end(memory), "it has left the group");
    }
  });
}

TEST(PeerMemory, OtherNumbersOfBytesAreAnErrorOnBothSides) {
  c10d::HashStore store;
  for (const int64_t numel : {int64_t{4}, kLargeNumel})
    on_two_threads([&](PeerMemory& memory, int rank) {
      const std::string round = std::to_string(numel);
      if (rank == 0) {
        const auto message = memory.receive(torch::zeros({numel}), 1, 7);
        meet(store, "announced " + round);
        EXPECT_EQ(memory.wait(message), Outcome::kOtherBytes);
      } else {
        meet(store, "announced " + round);
        EXPECT_THROW((void)memory.send(torch::zeros({numel + 1}), 0, 7), std::runtime_error);
      }
      meet(store, "seen " + round);
    });
}

TEST(PeerMemory, NobodyTouchesTheMemoryOfARankThatLeft) {
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    if (rank == 0) {
      const at::Tensor target = torch::zeros({4});
      const auto message = memory.receive(target, 1, 7);
      memory.close();
      meet(store, "left");
      meet(store, "sent");
      EXPECT_EQ(target.sum().item<float>(), 0.0f);
      EXPECT_THROW((void)memory.receive(target, 1, 8), std::runtime_error);
    } else {
      meet(store, "left");
      EXPECT_EQ(memory.wait(memory.send(torch::ones({4}), 0, 7)), Outcome::kPeerLeft);
      meet(store, "sent");
    }
  });
}

TEST(PeerMemory, AnInterruptEndsTheWait) {
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    if (rank == 0) {
      const auto message = memory.receive(torch::zeros({4}), 1, 7);
      std::thread interrupter([&] {
        std::this_thread::sleep_for(50ms);
        memory.interrupt();
      });
      EXPECT_EQ(memory.wait(message), Outcome::kInterrupted);
      interrupter.join();
    }
    meet(store, "over");
  });
}

TEST(PeerMemory, AllOfAHostsRanksUseItOrNone) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto rank_main = [&](int rank) { EXPECT_EQ(PeerMemory::connect(*store, rank, 2, 20s, rank == 0), nullptr); };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
}

TEST(PeerMemoryProcesses, OperationsAreTheSame) {
  for (const int world : {2, 3, 5}) {
    const auto codes = on_processes(world, [&](c10::intrusive_ptr<c10d::Store> store, int rank) {
      auto comm = make_gloo_communicator(std::move(store), rank, world, {"127.0.0.1", 30s});
      for (const int64_t numel : {1, 1000, 300001}) {
        const at::Tensor own = torch::arange(numel) + 1000 * rank;
        at::Tensor all = torch::empty({world * numel}, at::kLong), sum = own.clone(),
                   part = torch::empty({numel}, at::kLong);
        auto gathering = comm->all_gather(all, own);
        comm->all_reduce(sum).wait();
        gathering.wait();
        if (!all.equal(torch::cat([&] {
              std::vector<at::Tensor> shards;
              for (int peer = 0; peer < world; ++peer) shards.push_back(torch::arange(numel) + 1000 * peer);
              return shards;
            }())))
          return 1;
        if (!sum.equal(world * torch::arange(numel) + 500 * world * (world - 1))) return 2;
        comm->reduce_scatter(part, all).wait();
        if (!part.equal(world * own)) return 3;
      }
      comm->barrier();
      return 0;
    });
    EXPECT_EQ(codes, std::vector<int>(world, 0));
  }
}

TEST(PeerMemoryProcesses, ReachEachOtherHere) {
  const auto codes = on_processes(2, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    auto memory = PeerMemory::connect(*store, rank, 2, 30s, true);
    return memory != nullptr && memory->reaches(1 - rank) ? 0 : 77;
  });
  if (codes == std::vector<int>{77, 77}) GTEST_SKIP() << "the kernel does not let processes read each other's memory";
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

// Signals of a profiler, say, interrupt system calls.
TEST(PeerMemoryProcesses, AreAliveWhileSignalsArrive) {
  const auto codes = on_processes(2, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    auto memory = PeerMemory::connect(*store, rank, 2, 30s, true);
    if (memory == nullptr) return 77;
    struct sigaction action {};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGALRM, &action, nullptr);
    const itimerval every_50_us{{0, 50}, {0, 50}};
    ::setitimer(ITIMER_REAL, &every_50_us, nullptr);
    bool are_alive = true;
    for (int i = 0; i < 100'000; ++i) are_alive = memory->is_alive(1 - rank) && are_alive;
    ::setitimer(ITIMER_REAL, nullptr, nullptr);
    meet(*store, "end");
    return are_alive ? 0 : 1;
  });
  if (codes == std::vector<int>{77, 77}) GTEST_SKIP() << "the kernel does not let processes read each other's memory";
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

// Rank 0 cannot write to rank 1's memory. Both are still members of the group.
TEST(PeerMemoryProcesses, AMessageThatCannotBeCopiedIsNamedOnBothSides) {
  const auto codes = on_processes(2, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    auto memory = PeerMemory::connect(*store, rank, 2, 30s, true);
    if (!memory) return 77;
    int code = 1;
    if (rank == 0) {
      store->wait({"announced"});
      const auto message = memory->send(torch::ones({kLargeNumel}), 1, 7);
      try {
        (void)memory->wait(message);
      } catch (const PeerMemory::Unreachable&) {
        code = 0;
      }
      put(*store, "failed");
    } else {
      const size_t bytes = kLargeNumel * sizeof(float);
      void* const none = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      const auto message = memory->receive(torch::from_blob(none, {kLargeNumel}), 0, 7);
      put(*store, "announced");
      store->wait({"failed"});
      try {
        (void)memory->wait(message);
      } catch (const PeerMemory::Unreachable& error) {
        code = std::string(error.what()) == "a message could not be copied" ? 0 : 2;
      }
    }
    meet(*store, "over");
    return code;
  });
  if (codes == std::vector<int>{77, 77}) GTEST_SKIP() << "the kernel does not let processes read each other's memory";
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

// Neither store, launcher nor parent reports the death: rank 1 is a zombie until rank 0 has ended.
TEST(PeerMemoryProcesses, ARankThatIsKilledIsNoticedSoon) {
  const auto codes = on_processes(2, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    auto comm = make_gloo_communicator(std::move(store), rank, 2, {"127.0.0.1", 60s});
    comm->barrier();
    if (rank == 1) ::raise(SIGKILL);
    const auto began = std::chrono::steady_clock::now();
    try {
      at::Tensor all = torch::empty({2000});
      comm->all_gather(all, torch::ones({1000}), {}, "unit 'a'").wait();
    } catch (const CommError& error) {
      const std::string text = error.what();
      const bool names = text.find("unit 'a'") != std::string::npos && text.find("rank 1") != std::string::npos;
      return names && std::chrono::steady_clock::now() - began < 10s ? 0 : 2;
    }
    return 1;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 128 + SIGKILL}));
}

// The process id of a dead rank is reused at once, by a process that even has a copy of its memory.
TEST(PeerMemoryProcesses, AProcessWithTheNumberOfOneThatHasEndedIsAnother) {
  on_two_threads([](PeerMemory&, int) {});  // makes the process's random number, which fork then copies
  constexpr int kNoSuchNumber = 77;
  const auto codes = on_processes(1, [](const c10::intrusive_ptr<c10d::Store>&, int) {
    const testing_support::TemporaryFolder folder;
    const auto connect = [&](int rank) {
      auto store = c10::make_intrusive<c10d::FileStore>((folder / "store").string(), 2);
      return PeerMemory::connect(*store, rank, 2, 30s, true);
    };
    const pid_t peer = ::fork();
    if (peer == 0) {
      const auto memory = connect(1);
      for (;;) ::pause();
    }
    const auto memory = connect(0);
    if (!memory) return kNoSuchNumber;
    const auto end = [](pid_t child) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    };
    end(peer);
    pid_t other = 0;
    for (int tries = 0; tries < 100 && other != peer; ++tries) {
      if (other > 0) end(other);
      std::ofstream last("/proc/sys/kernel/ns_last_pid");
      if (!(last << peer - 1 << std::flush)) return kNoSuchNumber;
      other = ::fork();
      if (other == 0)
        for (;;) ::pause();
    }
    if (other != peer) {
      if (other > 0) end(other);
      return kNoSuchNumber;
    }
    const auto outcome = memory->wait(memory->receive(torch::empty({10}), 1, 5), RunClock::now() + 5s);
    end(other);
    return static_cast<int>(outcome);
  });
  if (codes[0] == kNoSuchNumber) GTEST_SKIP() << "process numbers cannot be chosen here (needs root)";
  EXPECT_EQ(codes[0], static_cast<int>(Outcome::kPeerDied));
}

// This thread kills or stops (SIGKILL, SIGSTOP) the process when it is about to write into another process's memory.
void end_instead_of_writing(int signal) {
  static int ends;
  ends = signal;
  struct sigaction action = {};
  action.sa_handler = [](int) { ::kill(::getpid(), ends); };
  ::sigaction(SIGSYS, &action, nullptr);
  sock_filter instructions[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(instructions), instructions};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    throw std::runtime_error("no seccomp here");
}

// The state of a process in /proc: 'T' if stopped, 'Z' if ended.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(") ");
  return name_end == text.npos ? 'X' : text.at(name_end + 2);
}

void await_state(pid_t pid, char state) {
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (state_of(pid) != state && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
}

TEST(PeerMemoryProcesses, ARankThatStopsOrDiesWhileItCopiesEndsTheOthersInTime) {
  constexpr int64_t kNumel = 1 << 20;
  for (const int signal : {SIGSTOP, SIGKILL}) {
    const auto codes = on_processes(2, [&](c10::intrusive_ptr<c10d::Store> store, int rank) {
      store->set("pid " + std::to_string(rank), std::to_string(::getpid()));
      auto comm = make_gloo_communicator(store, rank, 2, {"127.0.0.1", signal == SIGSTOP ? 2s : 60s});
      comm->barrier();
      if (rank == 1) {
        store->wait({"announced"});
        end_instead_of_writing(signal);
        at::Tensor all = torch::empty({2 * kNumel});
        comm->all_gather(all, torch::ones({kNumel}), {}, "unit 'a'").wait();
        return 1;
      }
      const pid_t other = std::stoi(store->get_to_str("pid 1"));
      auto began = std::chrono::steady_clock::now();
      const void* address = nullptr;
      int code = 2;
      try {
        at::Tensor all = torch::empty({2 * kNumel});
        address = all.const_data_ptr();
        auto gathering = comm->all_gather(all, torch::ones({kNumel}), {}, "unit 'a'");
        store->set("announced", std::string("yes"));
        await_state(other, signal == SIGSTOP ? 'T' : 'Z');
        began = std::chrono::steady_clock::now();
        gathering.wait();
      } catch (const CommError& error) {
        const std::string text = error.what();
        code = text.find("unit 'a'") != text.npos && text.find("rank 1") != text.npos ? 0 : 3;
        if (code != 0) fprintf(stderr, "%s\n", text.c_str());
      }
      comm.reset();
      if (std::chrono::steady_clock::now() - began > 6s) code = 4;
      // When it continues, it still writes to that address, which must never be reused.
      for (int i = 0; i < 4 && code == 0 && signal == SIGSTOP; ++i)
        if (torch::empty({2 * kNumel}).const_data_ptr() == address) code = 5;
      ::kill(other, SIGKILL);
      return code;
    });
    EXPECT_EQ(codes, (std::vector<int>{0, 128 + SIGKILL})) << signal;
  }
}

// Rank 0 announces its messages last, so it must copy. It drops the operation without a wait, and copies then.
TEST(PeerMemoryProcesses, ARankThatDropsAnOperationAndLeavesTakesNothingFromTheOthers) {
  constexpr int64_t kNumel = 1 << 20;
  const auto codes = on_processes(2, [](const c10::intrusive_ptr<c10d::Store>& store, int rank) {
    auto comm = make_gloo_communicator(store, rank, 2, {"127.0.0.1", 20s});
    comm->barrier();
    if (rank == 0) {
      store->wait({"announced"});
      (void)comm->all_gather(torch::empty({2 * kNumel}), torch::ones({kNumel}));
      comm.reset();
      store->set("left", std::string("yes"));
      return 0;
    }
    at::Tensor all = torch::zeros({2 * kNumel});
    auto gathering = comm->all_gather(all, torch::ones({kNumel}));
    store->set("announced", std::string("yes"));
    store->wait({"left"});
    gathering.wait();
    return all.eq(1.0).all().item<bool>() ? 0 : 1;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(PeerMemoryProcesses, AreReadByTheRanksOfTheirGroupAlone) {
  const auto codes = on_processes(3, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    auto memory = PeerMemory::connect(*store, rank, 3, 30s, true, /*permits_tracing=*/true);
    if (memory == nullptr) return 77;
    if (TracerPermission::told() != ::getppid()) return 1;  // the ancestor of all ranks
    {
      const TracerPermission wider(1), narrower(::getpid());
      if (TracerPermission::told() != 1) return 2;
    }
    if (TracerPermission::told() != ::getppid()) return 3;
    memory.reset();
    return TracerPermission::told() == 0 ? 0 : 4;
  });
  if (codes == std::vector<int>{77, 77, 77})
    GTEST_SKIP() << "the kernel does not let processes read each other's memory";
  EXPECT_EQ(codes, std::vector<int>(3, 0));
}

TEST(TracerPermission, IsForTheNearestCommonAncestor) {
  EXPECT_EQ(common_ancestor({{7, 5, 3, 1}, {8, 5, 3, 1}, {9, 6, 3, 1}}), 3);
  EXPECT_EQ(common_ancestor({{7, 5, 1}, {8, 7, 5, 1}}), 7);
  EXPECT_EQ(common_ancestor({{7, 5}, {8, 6}}), 0);
  const auto own = lineage();
  ASSERT_GE(own.size(), 2u);
  EXPECT_EQ(own[0], ::getpid());
  EXPECT_EQ(own[1], ::getppid());
}

// A rank waits for messages of one rank, and may copy those of others.
TEST(SharedBoard, WakesWhoeverAwaitsTheRankOrTheOperation) {
  constexpr auto kLong = 20s;
  const auto board = SharedBoard::create(3);
  SharedBoard::Member& member = board->member(0);
  member.awaited.store(1);
  member.awaited_operation.store(7);
  const auto sleeps_until = [&](int from, uint64_t operation) {
    const auto began = std::chrono::steady_clock::now();
    std::thread notifier([&] {
      while (member.is_asleep.load() == 0) std::this_thread::yield();
      std::this_thread::sleep_for(20ms);
      SharedBoard::notify(member, from, operation);
    });
    SharedBoard::sleep(member, member.events.load(), kLong);
    notifier.join();
    return std::chrono::steady_clock::now() - began;
  };
  EXPECT_LT(sleeps_until(1, SharedBoard::kNoOperation), kLong / 2);
  EXPECT_LT(sleeps_until(2, 7), kLong / 2);
  EXPECT_LT(sleeps_until(SharedBoard::kAnyone, SharedBoard::kNoOperation), kLong / 2);
}

// Any process may have written to the store.
TEST(SharedBoard, IsOpenedByItsOwnNoticeAlone) {
  const auto board = SharedBoard::create(2);
  EXPECT_EQ(SharedBoard::open(board->notice(), 2), board);
  EXPECT_THROW(SharedBoard::open(board->notice(), 3), std::runtime_error);
  EXPECT_THROW(SharedBoard::open(board->notice() + "1", 2), std::runtime_error);
  EXPECT_THROW(SharedBoard::open(std::to_string(::getpid()) + " 5 1 140000000000000", 2), std::runtime_error);
  EXPECT_THROW(SharedBoard::open("none", 2), std::runtime_error);
  const std::string notice = board->notice();
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 1;
    try {
      code = SharedBoard::open(notice, 2) != nullptr ? 0 : 2;
      SharedBoard::open(notice + "1", 2);
      code = 3;
    } catch (const std::exception&) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
}

}  // namespace
}  // namespace tessera::peer_memory_test
