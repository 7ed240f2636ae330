#include "core/runtime/parallel_over.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/tessera.h>
#include "core/model/shard_norm.h"

namespace tessera::parallel_over_test {
using namespace internal;
namespace {

// Returns the number of threads that took part, and checks that each element is visited once.
size_t threads_of(int64_t count, int64_t grain, int threads) {
  std::vector<int> visits(count, 0);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::thread([&] {
    at::set_num_threads(threads);
    parallel_over(0, count, grain, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) ++visits[i];
      std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
  }).join();
  EXPECT_EQ(visits, std::vector<int>(count, 1));
  return seen.size();
}

TEST(ParallelOver, TakesAsManyThreadsAsTheCallerMay) {
#ifdef __SANITIZE_THREAD__
  constexpr size_t kTwo = 1, kThree = 1;  // built without OpenMP
#else
  constexpr size_t kTwo = 2, kThree = 3;
#endif
  EXPECT_EQ(threads_of(100, 1, 2), kTwo);
  EXPECT_EQ(threads_of(100, 1, 3), kThree);
  EXPECT_EQ(threads_of(100, 1, 1), 1U);
  EXPECT_EQ(threads_of(100, 100, 3), 1U);  // too few for two threads
  EXPECT_EQ(threads_of(0, 1, 2), 0U);
}

// A step of HostAdamW, and the norm of a gradient, which is split into equal parts for any number of threads.
TEST(ParallelOver, ThreadsDoNotChangeABit) {
  const auto step_on = [](int threads) {
    std::pair<at::Tensor, double> result;
    std::thread([&] {
      at::set_num_threads(threads);
      run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
        at::set_num_threads(threads);
        const at::Tensor parameter = (torch::arange(300'007) / 1e5).sin().requires_grad_();
        parameter.mutable_grad() = parameter.detach().cos();
        HostAdamW optimizer({parameter}, torch::optim::AdamWOptions(1e-2));
        const GradNorm norm = clip_shards_by_norm({parameter.grad()}, 1.0, 2.0, false, *comm);
        optimizer.step();
        result = {parameter.detach(), norm};
      });
    }).join();
    return result;
  };
  const auto expected = step_on(1);
  for (int threads : {2, 3}) {
    const auto got = step_on(threads);
    EXPECT_TRUE(torch::equal(got.first, expected.first)) << threads << " threads";
    EXPECT_EQ(got.second, expected.second) << threads << " threads";
  }
}

TEST(ParallelOver, ThrowsWhatABodyThrows) {
  std::thread([] {
    at::set_num_threads(2);
    EXPECT_THROW(parallel_over(0, 100, 1,
                               [](int64_t, int64_t to) {
                                 if (to == 100) throw std::out_of_range("the last one");
                               }),
                 std::out_of_range);
  }).join();
}

}  // namespace
}  // namespace tessera::parallel_over_test
