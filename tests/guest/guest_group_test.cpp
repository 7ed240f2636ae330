// Groups from a store of the program.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/comm/guest/text_exchange.h"
#include "tests/comm/on_processes.h"
#include "tests/guest/guests.h"
#include "tests/support/free_port.h"

namespace {

using namespace tessera;
using namespace tessera::testing_support;
using namespace std::chrono_literals;

StorePtr hash_store() { return c10::make_intrusive<c10d::HashStore>(); }

long entries_of(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// Listening TCP sockets of this process.
long listening_ports() {
  std::set<std::string> own;  // inodes
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    const std::string target = std::filesystem::read_symlink(entry.path(), closed).string();
    if (target.starts_with("socket:[")) own.insert(target.substr(8, target.size() - 9));
  }
  long count = 0;
  for (const char* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      const std::vector<std::string> field{std::istream_iterator<std::string>(fields), {}};
      if (field.size() > 9 && field[3] == "0A" && own.contains(field[9])) ++count;
    }
  }
  return count;
}

TEST(GuestStore, RunsAllCollectivesOverAnyStore) {
  for (const int world : {1, 2, 3, 5})
    for (const bool peer_memory : {true, false}) {
      const StorePtr store = hash_store();
      EXPECT_EQ(on_threads(world,
                           [&](int rank) {
                             const auto comm =
                                 communicator_from(store, rank, world, {.timeout = 60s, .peer_memory = peer_memory});
                             EXPECT_EQ(comm->rank(), rank);
                             EXPECT_EQ(comm->size(), world);
                             EXPECT_EQ(comm->device(), at::kCPU);
                             check_collectives(*comm);
                           }),
                no_errors(world));
    }
}

TEST(GuestStore, SplitsOverAStoreWithoutATimeout) {
  const StorePtr store = hash_store();
  store->setTimeout(c10d::Store::kNoTimeout);
  EXPECT_EQ(on_threads(2,
                       [&](int rank) {
                         const auto comm = communicator_from(store, rank, 2, {.timeout = 60s});
                         if (rank == 1) std::this_thread::sleep_for(100ms);  // rank 0 waits
                         check_collectives(*comm->split(0));
                       }),
            no_errors(2));
}

TEST(GuestStore, TrainsForcesInFp64UnderEveryWrapper) {
  for (const Wrapper wrapper : {Wrapper::kDdp, Wrapper::kOssSdp, Wrapper::kFsdp}) {
    const StorePtr store = hash_store();
    EXPECT_EQ(on_threads(3,
                         [&](int rank) {
                           const auto comm = communicator_from(store, rank, 3, {.timeout = 60s});
                           EXPECT_LT(difference_from_reference(train_forces(comm, wrapper), 3), 1e-12);
                         }),
              no_errors(3))
        << static_cast<int>(wrapper);
  }
}

TEST(GuestStore, ServesProcessesWithAFileOrATcpStore) {
  for (const bool tcp : {false, true}) {
    const int port = tcp ? free_port() : 0;
    const auto codes = on_processes(2, [&](StorePtr store, int rank) {
      at::set_num_threads(1);
      if (tcp) {
        c10d::TCPStoreOptions options;
        options.port = static_cast<uint16_t>(port);
        options.isServer = rank == 0;
        options.waitWorkers = false;
        store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      }
      for (int i = 0; i < 3; ++i) {
        const auto comm = communicator_from(store, rank, 2, {.timeout = 60s});
        check_collectives(*comm);
        if (difference_from_reference(train_forces(comm, Wrapper::kFsdp), 2) > 1e-12) return 1;
      }
      return 0;
    });
    EXPECT_EQ(codes, std::vector<int>(2, 0)) << "tcp " << tcp;
  }
}

TEST(GuestStore, RefusesUnequalOptionsOnEveryRank) {
  const StorePtr store = hash_store();
  for (const std::string& error :
       on_threads(3, [&](int rank) { communicator_from(store, rank, 3, {.timeout = rank == 1 ? 50s : 60s}); })) {
    EXPECT_NE(error.find("rank 1 passes"), std::string::npos) << error;
    EXPECT_NE(error.find("timeout 50000 ms"), std::string::npos) << error;
    EXPECT_NE(error.find("expected equal GroupOptions"), std::string::npos) << error;
  }
}

TEST(GuestStore, TellsEveryRankTheMistakeOfOne) {
  const StorePtr store = hash_store();
  for (const std::string& error : on_threads(3, [&](int rank) {
         communicator_from(store, rank, 3, {.backend = rank == 2 ? "mpi" : "", .timeout = 60s});
       }))
    EXPECT_NE(error.find("on rank 2 of 3: GroupOptions::backend is \"mpi\"; expected"), std::string::npos) << error;
}

TEST(GuestStore, TellsEveryRankAnInvalidTimeoutOfOne) {
  for (const auto timeout : {0ms, std::chrono::milliseconds::max(), std::chrono::milliseconds::min()}) {
    const StorePtr store = hash_store();
    for (const std::string& error :
         on_threads(2, [&](int rank) { communicator_from(store, rank, 2, {.timeout = rank == 1 ? timeout : 60s}); }))
      EXPECT_NE(error.find("on rank 1 of 2: GroupOptions::timeout is "), std::string::npos) << error;
  }
}

TEST(GuestStore, RefusesWrongArguments) {
  EXPECT_THROW(communicator_from(StorePtr(), 0, 1), std::invalid_argument);
  EXPECT_THROW(communicator_from(hash_store(), 2, 2), std::invalid_argument);
  EXPECT_THROW(communicator_from(hash_store(), -1, 2), std::invalid_argument);
  EXPECT_THROW(communicator_from(hash_store(), 0, 0), std::invalid_argument);
  EXPECT_THROW(communicator_from(hash_store(), 0, 1, {.timeout = 0s}), std::invalid_argument);
  EXPECT_THROW(communicator_from(hash_store(), 0, 1, {.backend = "ucc"}), std::invalid_argument);
  EXPECT_THROW(communicator_from(hash_store(), 0, 1, {.registered_memory = true}), std::invalid_argument);
}

TEST(GuestStore, NamesTheRanksThatDoNotCome) {
  const StorePtr store = hash_store();
  const auto errors = on_threads(2, [&](int rank) { communicator_from(store, rank, 4, {.timeout = 300ms}); });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("ranks 2, 3 did not come within 0.3 s"), std::string::npos) << error;
}

TEST(GuestStore, NamesAnotherWorldSize) {
  const StorePtr store = hash_store();
  const auto errors = on_threads(
      2, [&](int rank) { internal::exchange_through(store, "meeting/", rank, rank == 0 ? 2 : 3, 10s)("text"); });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("expected the same size on all ranks"), std::string::npos) << error;
}

TEST(GuestStore, RefusesARankThatComesTwice) {
  const StorePtr store = hash_store();
  const auto exchange = [&] { return internal::exchange_through(store, "meeting/", 1, 2, 100ms)("text"); };
  EXPECT_THROW(exchange(), CommError);
  EXPECT_THROW(exchange(), std::invalid_argument);
}

// Compares keys of the store, descriptors, threads, ports and memory after 100 groups and after 1,000.
TEST(GuestStore, AThousandGroupsLeaveNothingBehind) {
  const StorePtr store = hash_store();
  const auto make = [&](int count) {
    EXPECT_EQ(on_threads(2,
                         [&](int rank) {
                           std::vector<std::shared_ptr<Communicator>> alive;  // several at once
                           for (int i = 0; i < count; ++i) {
                             alive.push_back(communicator_from(store, rank, 2, {.timeout = 60s}));
                             at::Tensor tensor = torch::ones({3});
                             alive.back()->all_reduce(tensor).wait();
                             EXPECT_EQ(tensor[0].item<float>(), 2);
                             if (alive.size() == 4) alive.erase(alive.begin(), alive.begin() + 3);
                           }
                         }),
              no_errors(2));
  };
  const auto resident = [] {
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return pages * 4096;
  };
  const long ports = listening_ports();
  make(100);
  const long descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  const int64_t keys = store->getNumKeys();
  const long memory = resident();
  make(900);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_LE(entries_of("/proc/self/task"), threads + 1);  // one may be ending
  EXPECT_LE(store->getNumKeys(), keys + 100);
  EXPECT_LE(listening_ports(), ports);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they keep memory that is freed
  EXPECT_LT(resident() - memory, 16 << 20);
#else
  static_cast<void>(memory);
#endif
}

}  // namespace
