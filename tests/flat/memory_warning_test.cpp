// The warning that a wrapper needs more memory than is free.
#include "core/model/memory_warning.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <tessera/plan.h>
#include "core/layout/deferred.h"
#include "core/memory/free_memory.h"
#include "tests/support/reference.h"

namespace tessera::memory_warning_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int64_t kGib = int64_t{1} << 30;

// Counts the library's warnings on this thread.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    if (warning.msg().find(" take") != std::string::npos) texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;
};

TEST(MemoryWarning, CountsTheRanksThatShareAMemoryAndWhatGoes) {
  const MemoryNeed need{.parameter_bytes = 4 * kGib, .gradient_bytes = 4 * kGib, .in_use_bytes = kGib};
  EXPECT_EQ(memory_warning("W", need, 2, 18 * kGib), "");
  const std::string text = memory_warning("W on rank 0", need, 2, 18 * kGib - 1);
  expect_contains(text,
                  "W on rank 0: parameters (4.0 GiB), gradients (4.0 GiB) and units in use (1.0 GiB) take 9.0 GiB");
  expect_contains(text, "on each of 2 ranks that share this memory, of which 18.0 GiB are free. The optimizer's state");
  MemoryNeed freeing = need;
  freeing.freed_bytes = 5 * kGib;
  EXPECT_EQ(memory_warning("W", freeing, 2, 8 * kGib), "");
  expect_contains(memory_warning("W", freeing, 2, 7 * kGib), "of which 7.0 GiB are free, and 10.0 GiB will be");
  expect_contains(memory_warning("W", {.gradient_bytes = 3 << 20}, 1, 2 << 20),
                  "W: gradients (3.0 MiB) take 3.0 MiB on this rank");
}

// A plan includes the optimizer and activations.
TEST(MemoryWarning, GoesByAPlanWhereThereIsOne) {
  const MemoryNeed need{
      .parameter_bytes = 4 * kGib, .gradient_bytes = 4 * kGib, .freed_bytes = kGib, .present_bytes = kGib};
  {
    const PlannedMemoryScope planned(20 * kGib);
    EXPECT_EQ(memory_warning("W", need, 2, 36 * kGib), "");
    const std::string text = memory_warning("W", need, 2, 35 * kGib);
    expect_contains(text,
                    "W: a step as planned takes 20.0 GiB on each of 2 ranks that share this memory, of which 35.0");
    expect_contains(text, "and 4.0 GiB are taken already: tessera plan says what fits");
    on_ranks(1, [](std::shared_ptr<Communicator> comm) {
      Warnings warnings;
      const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      const PlannedMemoryScope huge(int64_t{1} << 50);
      const DistributedDataParallel ddp(torch::nn::Linear(8, 8), comm);
      ASSERT_EQ(warnings.texts.size(), 1U);
    });
  }
  EXPECT_EQ(memory_warning("W", need, 2, 14 * kGib), "");
}

TEST(MemoryWarning, KnowsWhatTheSystemHas) {
  const auto free_bytes = free_memory_bytes(at::kCPU);
  ASSERT_TRUE(free_bytes.has_value());
  EXPECT_GT(*free_bytes, 0);
  EXPECT_LT(*free_bytes, ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE));
}

// The warning precedes allocation: each parameter is larger than memory, and is never allocated.
TEST(MemoryWarning, ComesBeforeTheMemoryIsTaken) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    { FullyShardedDataParallel fits(torch::nn::Linear(8, 8), comm); }
    EXPECT_TRUE(warnings.texts.empty());
    const auto read = [](Range, void*) { throw std::runtime_error("read"); };
    struct Wide : torch::nn::Module {
      explicit Wide(const ReadElements& read) {
        const std::vector<int64_t> sizes{1 << 24, 1 << 24};  // 1 PiB, more than addresses reach
        weight = register_parameter("weight", deferred_from(sizes, {1 << 24, 1}, at::kFloat, at::kCPU, read));
      }
      at::Tensor forward(const at::Tensor& x) { return x; }
      at::Tensor weight;
    };
    EXPECT_ANY_THROW(FullyShardedDataParallel(std::make_shared<Wide>(read), comm));
    ASSERT_EQ(warnings.texts.size(), comm->rank() == 0 ? 1U : 0U);
    if (comm->rank() == 0)
      expect_contains(warnings.texts[0],
                      "FullyShardedDataParallel on rank 0: parameters (524288.0 GiB), gradients (524288.0");
  });
}

}  // namespace
}  // namespace tessera::memory_warning_test
