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

// Checks that the newest checkpoint is complete and all its values, optimizer state included, are equal; returns the
// value.
double value_of_newest(const std::filesystem::path& folder) {
  const auto latest = latest_checkpoint(folder);
  if (!latest) return 0;
  const auto problems = verify_checkpoint(*latest);
  EXPECT_TRUE(problems.empty()) << *latest << ": " << problems.at(0);
  const SavedTensors saved = find_tensors(*latest);
  SliceReader reader(saved);
  const double value = read_manifest(*latest).extra["value"].get<double>();
  for (const auto& [name, tensor] : saved.tensors)
    EXPECT_TRUE(reader.read(name, whole_box(tensor.shape)).eq(value).all().item<bool>()) << *latest << " " << name;
  EXPECT_EQ(saved.tensors.size(), 6U) << "two parameters, two moments of each";
  return value;
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

// Runs one rank in its own process: resumes from the newest checkpoint and saves until another rank is lost.
void save_until_alone(const std::filesystem::path& folder, int rank, int world, int port) {
  const auto comm = join(rank, world, port, std::chrono::seconds(4));
  FullyShardedDataParallel fsdp(torch::nn::Linear(24, 24), comm);
  torch::optim::Adam adam(fsdp.parameters(), torch::optim::AdamOptions(0.1));
  const auto loaded = load_newest_checkpoint(folder, fsdp, adam);
  int value = loaded ? loaded->extra["value"].get<int>() : 0;
  // Visits the parameters and their moments.
  auto for_each_tensor = [&](const std::function<void(const at::Tensor&)>& visit) {
    for (const auto& shard : fsdp.parameters()) {
      auto& state = static_cast<torch::optim::AdamParamState&>(*adam.state().at(shard.unsafeGetTensorImpl()));
      for (const auto& tensor : {shard.detach(), state.exp_avg(), state.exp_avg_sq()}) visit(tensor);
      if (state.step() != value) ::_exit(4);
    }
  };
  if (loaded)
    for_each_tensor([&](const at::Tensor& tensor) {
      if (!tensor.eq(value).all().item<bool>()) ::_exit(3);
    });
  for (;;) {
    const at::NoGradGuard no_grad;
    ++value;
    for (auto& shard : fsdp.parameters()) shard.mutable_grad() = torch::ones_like(shard);
    adam.step();
    for_each_tensor([&](const at::Tensor& tensor) { tensor.fill_(value); });
    const auto name = folder / ("step-" + std::to_string(value % 5));
    if (value % 2 == 0) {
      save_checkpoint(name, fsdp, adam, {{"value", value}}, {.keep_last = 2});
    } else {
      save_checkpoint_async(name, fsdp, adam, {{"value", value}}, {.keep_last = 2}).wait();
    }
  }
}

// The other ranks end by themselves, and another number of ranks loads the last checkpoint.
TEST(CheckpointKilled, OneOfSeveralProcessesAtATime) {
  const TemporaryFolder folder;
  std::mt19937 random(11);
  const char* asked = std::getenv("TESSERA_KILL_ROUNDS");
  const int rounds = asked == nullptr ? 6 : std::atoi(asked);
  double last = 0;
  for (int round = 0; round < rounds; ++round) {
    const int world = 2 + static_cast<int>(random() % 3), port = free_port();
    std::vector<pid_t> children;
    for (int rank = 0; rank < world; ++rank) {
      children.push_back(::fork());
      if (children.back() != 0) continue;
      try {
        save_until_alone(folder.path(), rank, world, port);
      } catch (const std::exception&) {
        ::_exit(1);  // the others are lost
      }
    }
    const auto began = std::chrono::steady_clock::now();
    while (value_of_newest(folder.path()) == last &&
           std::chrono::steady_clock::now() - began < std::chrono::seconds(20))
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60000));
    const size_t victim = random() % children.size();
    ::kill(children[victim], SIGKILL);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (size_t rank = 0; rank < children.size(); ++rank) {
      int status = 0;
      while (::waitpid(children[rank], &status, WNOHANG) == 0) {
        if (std::chrono::steady_clock::now() > end) {
          ADD_FAILURE() << "round " << round << ": rank " << rank << " of " << world << " hangs without rank "
                        << victim;
          ::kill(children[rank], SIGKILL);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (rank != victim) {
        EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 1) << "round " << round;
      }
    }
    const double value = value_of_newest(folder.path());
    EXPECT_GE(value, last) << "round " << round;
    last = value;
  }
  EXPECT_GT(last, rounds) << "hardly anything was saved";
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
