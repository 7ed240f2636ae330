// Messages from memory to memory: between threads, and between processes that may die.
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
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/backends.h"
#include "tessera/comm/peer_memory.h"
#include "tessera/comm/published_memory.h"
#include "tests/comm/on_processes.h"
#include "tests/support/temporary_folder.h"

namespace tessera::peer_memory_test {
namespace {

using namespace std::chrono_literals;
using testing_support::on_processes;
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

// Counts the values that a rank reads in the store.
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

// Two hosts, as it were: of one rank takes part, of the other three.
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

// What stands on the board leads to memory that a rank has announced, for what it has announced it, or nowhere.
TEST(PeerMemory, NothingOnTheBoardIsFollowedAsAnAddress) {
  c10d::HashStore store;
  const at::Tensor secret = torch::full({8}, 7.0);
  for (const uint64_t written : {uint64_t{8}, reinterpret_cast<uint64_t>(secret.const_data_ptr())}) {
    on_two_threads([&](PeerMemory& memory, int rank) {
      at::Tensor x = torch::full({8}, static_cast<float>(rank));
      const std::string round = std::to_string(written);
      PeerMemory::Announced announced;
      if (rank == 0) {
        announced = memory.send(x, 1, 5);
        memory.board()->channel(0, 1).slots[0].address = written;
      }
      meet(store, "announced " + round);
      if (rank == 1) {
        EXPECT_THROW(memory.receive(x, 0, 5), std::runtime_error);
        EXPECT_TRUE(x.eq(1.0).all().item<bool>());
      }
      meet(store, "received " + round);
      if (rank == 0) {
        EXPECT_EQ(memory.wait(announced), Outcome::kPeerLeft);
      }
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

// Its number is soon another's, who here has a copy even of what lies in its memory.
TEST(PeerMemoryProcesses, AProcessWithTheNumberOfOneThatHasEndedIsAnother) {
  on_two_threads([](PeerMemory&, int) {});  // what a process is told apart by is chosen, and copied by fork
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
    if (other != peer) return kNoSuchNumber;
    const auto outcome = memory->wait(memory->receive(torch::empty({10}), 1, 5), std::chrono::steady_clock::now() + 5s);
    end(other);
    return static_cast<int>(outcome);
  });
  if (codes[0] == kNoSuchNumber) GTEST_SKIP() << "process numbers cannot be chosen here (needs root)";
  EXPECT_EQ(codes[0], static_cast<int>(Outcome::kPeerDied));
}

// This thread stops the process when it is about to write into another one's memory.
void stop_instead_of_writing() {
  struct sigaction action = {};
  action.sa_handler = [](int) { ::kill(::getpid(), SIGSTOP); };
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

TEST(PeerMemoryProcesses, ARankThatStopsWhileItCopiesEndsTheOthersInTime) {
  constexpr int64_t kNumel = 1 << 20;
  const auto codes = on_processes(2, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    store->set("pid " + std::to_string(rank), std::to_string(::getpid()));
    auto comm = make_gloo_communicator(store, rank, 2, {"127.0.0.1", 2s});
    comm->barrier();
    if (rank == 1) {
      std::this_thread::sleep_for(200ms);  // it comes second to every message, and copies
      stop_instead_of_writing();
      at::Tensor all = torch::empty({2 * kNumel});
      comm->all_gather(all, torch::ones({kNumel}), {}, "unit 'a'").wait();
      return 1;
    }
    const auto began = std::chrono::steady_clock::now();
    const void* address = nullptr;
    int code = 2;
    try {
      at::Tensor all = torch::empty({2 * kNumel});
      address = all.const_data_ptr();
      comm->all_gather(all, torch::ones({kNumel}), {}, "unit 'a'").wait();
    } catch (const CommError& error) {
      const std::string text = error.what();
      code = text.find("unit 'a'") != text.npos && text.find("rank 1") != text.npos ? 0 : 3;
      if (code != 0) fprintf(stderr, "%s\n", text.c_str());
    }
    comm.reset();
    if (std::chrono::steady_clock::now() - began > 6s) code = 4;
    // When it is continued it goes on to write there: nothing else may ever be in that place.
    for (int i = 0; i < 4 && code == 0; ++i)
      if (torch::empty({2 * kNumel}).const_data_ptr() == address) code = 5;
    ::kill(std::stoi(store->get_to_str("pid 1")), SIGKILL);
    return code;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 128 + SIGKILL}));
}

TEST(PeerMemoryProcesses, AreReadByTheRanksOfTheirGroupAlone) {
  const auto codes = on_processes(3, [](c10::intrusive_ptr<c10d::Store> store, int rank) {
    auto memory = PeerMemory::connect(*store, rank, 3, 30s, true);
    if (memory == nullptr) return 77;
    if (TracerPermission::told() != ::getppid()) return 1;  // from whom all ranks descend
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

// What stands in the store may be anybody's.
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
