// Kills a program that saves repeatedly at random moments; a complete checkpoint always remains.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/free_port.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::kill_test {
using namespace internal;
namespace {

using namespace testing_support;

// Saves until it is killed. Writes a byte to `started` when it begins.
void save_for_ever(const std::filesystem::path& folder, int started) {
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    auto net = torch::nn::Linear(64, 64);
    Replicated model(net.ptr(), comm);
    if (comm->rank() == 0 && ::write(started, "", 1) != 1) throw std::runtime_error("the parent is gone");
    for (int n = 1;; ++n) {
      {
        const at::NoGradGuard no_grad;
        net->weight.fill_(n);
      }
      const auto name = folder / ("step-" + std::to_string(n % 4));
      if (n % 3 == 0) {
        auto pending = save_checkpoint_async(name, model, {{"value", n}}, {.keep_last = 2});
        pending.wait();
      } else {
        save_checkpoint(name, model, {{"value", n}}, {.keep_last = 2});
      }
    }
  });
}

// Forks instead of starting a program, because loading libtorch takes longer than the test. So this process must not
// start threads or thread pools, which a child would lack.
TEST(CheckpointKilled, KilledAtAnyMomentTheLastCompleteOneIsWhole) {
  const TemporaryFolder folder;
  std::mt19937 random(7);
  const int rounds = std::getenv("TESSERA_TEST_TREES") == nullptr ? 150 : 15;
  int found = 0;
  unsigned moments_us = 40000;  // from the child's start; should cover several saves
  double last = 0;
  for (int round = 0; round < rounds; ++round) {
    int started[2];
    ASSERT_EQ(::pipe2(started, O_CLOEXEC), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        save_for_ever(folder.path(), started[1]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "the saving process: %s\n", error.what());
      }
      ::_exit(1);
    }
    ::close(started[1]);
    char byte = 0;
    EXPECT_EQ(::read(started[0], &byte, 1), 1) << "the child ended early";
    ::close(started[0]);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % moments_us));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended by itself";
    const auto latest = latest_checkpoint(folder.path());
    if (!latest) {
      moments_us = std::min(2 * moments_us, 2000000u);  // a slow machine, or a sanitizer
      continue;
    }
    ++found;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      if (entry.path().filename().string()[0] == '.') continue;
      const auto problems = verify_checkpoint(entry.path());
      EXPECT_TRUE(problems.empty()) << entry.path() << ": " << problems.at(0);
    }
    const Manifest manifest = read_manifest(*latest);
    SliceReader reader(manifest.saved);
    const at::Tensor weight = reader.read("weight", whole_box({64, 64}));
    const float* values = weight.const_data_ptr<float>();
    for (int i = 0; i < 64 * 64; ++i) ASSERT_EQ(values[i], manifest.extra["value"].get<float>());
    EXPECT_GE(static_cast<double>(manifest.sequence), last);
    last = static_cast<double>(manifest.sequence);
  }
  EXPECT_GT(found, rounds / 2) << "the children hardly ever got as far as a save";
}

// Makes this forked process the rank.
std::shared_ptr<Communicator> join(int rank, int world, int port, std::chrono::milliseconds timeout) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(world).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  at::set_num_threads(1);
  return init({.timeout = timeout});
}

// A waiting rank detects the death before the group's timeout, which is minutes in production.
TEST(CheckpointKilled, ARankThatDiesInAnAsynchronousSaveIsNamed) {
  const TemporaryFolder folder;
  constexpr int kWorld = 3, kVictim = 1;
  const int port = free_port();
  std::vector<pid_t> children;
  for (int rank = 0; rank < kWorld; ++rank) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    std::string error;
    try {
      const auto comm = join(rank, kWorld, port, std::chrono::seconds(4));
      FullyShardedDataParallel fsdp(torch::nn::Linear(1000, 1000), comm);
      const rlimit little{1 << 16, 1 << 16};  // SIGXFSZ ends the process at its first write
      if (rank == kVictim) ::setrlimit(RLIMIT_FSIZE, &little);
      save_checkpoint_async(folder / "one", fsdp).wait();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    const bool is_named =
        error.find("rank 1 did not finish writing: the process of rank 1 has ended") != std::string::npos;
    if (!is_named) std::fprintf(stderr, "rank %d: %s\n", rank, error.c_str());
    ::_exit(is_named ? 5 : 6);
  }
  for (int rank = 0; rank < kWorld; ++rank) {
    const pid_t child = children[static_cast<size_t>(rank)];
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (rank == kVictim)
      EXPECT_TRUE(WIFSIGNALED(status)) << status;
    else
      EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 5) << "rank " << rank;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "one"));
}

}  // namespace
}  // namespace tessera::kill_test
