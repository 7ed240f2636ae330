// The copy engine with the CPU as a simulated accelerator: order, both directions at once, errors.
#include "core/runtime/copy_engine.h"
#include "offload/streams/simulated_link.h"

#include <chrono>
#include <future>

#include "tests/support/reference.h"

namespace tessera::copy_engine_test {
using namespace internal;
namespace {

using namespace testing_support;

// An event that another thread sets once; wait() has a timeout.
class Signal {
 public:
  void give() { promise_.set_value(); }
  bool wait() const { return future_.wait_for(std::chrono::seconds(60)) == std::future_status::ready; }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

std::unique_ptr<CopyEngine> engine_with(SimulatedLink link) {
  const SimulatedLinkScope scope(std::move(link));
  return CopyEngine::make(at::kCPU);
}

TEST(CopyEngine, MovesAndCountsBytes) {
  const auto engine = engine_with({});
  const at::Tensor host = torch::randn({1000}), device = torch::zeros({1000}), back = torch::zeros({1000});
  engine->to_device(device, host).wait();
  EXPECT_TRUE(torch::equal(device, host));
  Copy copy = engine->to_host(back, device);
  copy.wait();
  EXPECT_FALSE(copy.done());
  copy.wait_on_host();
  EXPECT_TRUE(copy.done());
  EXPECT_TRUE(torch::equal(back, host));
  engine->to_host(torch::empty({0}), torch::empty({0})).wait();
  EXPECT_EQ(engine->traffic().to_device_bytes, 4000);
  EXPECT_EQ(engine->traffic().to_host_bytes, 4000);
  EXPECT_EQ(engine->traffic().copies, 3);
}

TEST(CopyEngine, GoesOnBesideTheCaller) {
  Signal computed;
  const auto engine = engine_with({.before_copy = [&](CopyDirection, int64_t) { EXPECT_TRUE(computed.wait()); }});
  const at::Tensor host = torch::ones({10}), device = torch::zeros({10});
  Copy copy = engine->to_device(device, host);
  computed.give();  // reached before the copy can be over
  copy.wait();
  EXPECT_TRUE(torch::equal(device, host));
}

TEST(CopyEngine, OneDirectionDoesNotWaitForTheOther) {
  Signal went_in;
  const auto engine = engine_with({.before_copy = [&](CopyDirection direction, int64_t) {
    if (direction == CopyDirection::kToHost) {
      EXPECT_TRUE(went_in.wait());
    }
  }});
  const at::Tensor out = torch::zeros({5}), in = torch::zeros({5});
  Copy held = engine->to_host(out, torch::ones({5}));
  engine->to_device(in, torch::full({5}, 2.0)).wait();
  went_in.give();
  held.wait();
  EXPECT_EQ(out.sum().item<float>() + in.sum().item<float>(), 15);
  EXPECT_GE(engine->traffic().late_copies, 0);
}

TEST(CopyEngine, KeepsTheOrderOfOneDirection) {
  std::vector<int64_t> order;
  const auto engine = engine_with({.before_copy = [&](CopyDirection, int64_t bytes) { order.push_back(bytes); }});
  std::vector<Copy> copies;
  for (int64_t numel = 1; numel < 20; ++numel)
    copies.push_back(engine->to_device(torch::zeros({numel}), torch::ones({numel})));
  for (Copy& copy : copies) copy.wait();
  ASSERT_EQ(order.size(), 19U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(CopyEngine, KeepsTensorsAliveAndFinishesWhenDestroyed) {
  at::Tensor device = torch::zeros({4});
  {
    const auto engine = engine_with({.bytes_per_s = 1000});
    const Copy forgotten = engine->to_device(device, torch::ones({4}));
  }
  EXPECT_EQ(device.sum().item<float>(), 4);
}

TEST(CopyEngine, AFailureReachesWhoeverWaits) {
  const auto engine = engine_with({.before_copy = [](CopyDirection, int64_t bytes) {
    if (bytes == 8) throw std::runtime_error("the link is down");
  }});
  Copy bad = engine->to_device(torch::zeros({2}), torch::ones({2}));
  Copy good = engine->to_device(torch::zeros({3}), torch::ones({3}));
  EXPECT_EQ(error_of<std::runtime_error>([&] { bad.wait(); }), "the link is down");
  EXPECT_EQ(error_of<std::runtime_error>([&] { bad.wait_on_host(); }), "the link is down");
  EXPECT_TRUE(bad.done());
  good.wait();
}

TEST(CopyEngine, RefusesWhatItCannotCopy) {
  const auto engine = engine_with({});
  auto refused = [&](const at::Tensor& to, const at::Tensor& from) {
    return error_of<std::invalid_argument>([&] { engine->to_device(to, from).wait(); });
  };
  expect_contains(refused(torch::zeros({2}), torch::zeros({3})), "to Float [2] on cpu from Float [3]");
  expect_contains(refused(torch::zeros({2}), torch::zeros({2}, at::kDouble)),
                  "expected contiguous tensors of one dtype");
  expect_contains(refused(torch::zeros({2, 2}).t(), torch::zeros({2, 2})), "contiguous");
}

TEST(CopyEngine, OnlyWhatIsMadeInASimulatedLinksScopeOnItsThreadHasIt) {
  std::atomic<int> outer = 0, inner = 0;
  const at::Tensor from = torch::ones({4}), to = torch::zeros({4});
  auto copy_once = [&](CopyEngine& engine) { engine.to_host(to, from).wait_on_host(); };
  SimulatedLinkScope first({.before_copy = [&](CopyDirection, int64_t) { ++outer; }});
  std::unique_ptr<CopyEngine> engine;
  {
    SimulatedLinkScope second({.before_copy = [&](CopyDirection, int64_t) { ++inner; }});
    engine = CopyEngine::make(at::kCPU);
  }
  copy_once(*engine);
  copy_once(*CopyEngine::make(at::kCPU));
  std::thread([&] { copy_once(*CopyEngine::make(at::kCPU)); }).join();
  EXPECT_EQ(inner, 1);
  EXPECT_EQ(outer, 1);
}

}  // namespace
}  // namespace tessera::copy_engine_test
