// A program that saves over and over is killed at random moments; what is left is always whole.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/slice_reader.h"
#include "tessera/checkpoint/verify.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::kill_test {
namespace {

using namespace testing_support;

// Saves over and over, until it is killed. Writes a byte to `started` when it begins.
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

// Forked, not started anew: loading libtorch would take longer than the test. So this process starts
// no thread and no thread pool, which a child could miss.
TEST(CheckpointKilled, KilledAtAnyMomentTheLastCompleteOneIsWhole) {
  const TemporaryFolder folder;
  std::mt19937 random(7);
  const int rounds = std::getenv("TESSERA_TEST_TREES") == nullptr ? 150 : 15;
  int found = 0;
  unsigned moments_us = 40000;  // from the child's start: to be as long as some saves take
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

}  // namespace
}  // namespace tessera::kill_test
