// Messages from memory to memory: between threads, and between processes that may die.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <csignal>
#include <functional>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/backends.h"
#include "tessera/comm/peer_memory.h"
#include "tests/support/temporary_folder.h"

namespace tessera::peer_memory_test {
namespace {

using namespace std::chrono_literals;
using testing_support::TemporaryFolder;
using Outcome = PeerMemory::Outcome;

// The body on both of two ranks, threads of this process.
void on_two_threads(const std::function<void(PeerMemory&, int rank)>& body, std::chrono::milliseconds timeout = 20s) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto rank_main = [&](int rank) {
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

TEST(PeerMemory, OtherNumbersOfBytesAreAnErrorOnBothSides) {
  c10d::HashStore store;
  on_two_threads([&](PeerMemory& memory, int rank) {
    if (rank == 0) {
      const auto message = memory.receive(torch::zeros({4}), 1, 7);
      meet(store, "announced");
      EXPECT_EQ(memory.wait(message), Outcome::kOtherBytes);
    } else {
      meet(store, "announced");
      EXPECT_THROW((void)memory.send(torch::zeros({5}), 0, 7), std::runtime_error);
    }
    meet(store, "seen");
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

// Ranks as processes, forked from this one; gives what they exited with, 128 + signal where one ended them.
std::vector<int> on_processes(int world, const std::function<int(c10::intrusive_ptr<c10d::Store>, int rank)>& body) {
  const TemporaryFolder folder;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 99;
      try {
        code = body(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), world), rank);
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  // Reaped in order, so a later one that dies is a zombie for a while: its process id is still there.
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
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

// No store, no launcher and no parent tells the other: rank 1 is a zombie until rank 0 has ended.
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

}  // namespace
}  // namespace tessera::peer_memory_test
