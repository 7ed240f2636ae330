// Tests the simulated accelerator itself: it must find races, and must accept correct code.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/accelerator/ranks.h"
#include "tests/support/accelerator/streams.h"
#include "tests/support/reference.h"

namespace tessera::simulation_test {
using namespace internal;
namespace {

using accelerator::Request;
using accelerator::Simulation;
using testing_support::error_of;
using testing_support::expect_contains;

const at::Device kDevice(at::kCUDA, 0);

c10::Stream current_stream() { return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(kDevice); }
c10::Stream new_stream() { return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(kDevice); }

// Makes later work on `then` wait for all earlier work on `first`.
void order(const c10::Stream& first, const c10::Stream& then) {
  c10::Event event(at::kCUDA);
  event.record(first);
  event.block(then);
}

// Expects one finding that names both accesses.
void expect_found(const std::string& one, const std::string& other) {
  const auto findings = Simulation::findings();
  ASSERT_FALSE(findings.empty());
  expect_contains(findings[0], one);
  expect_contains(findings[0], other);
}

// Skips these tests on a GPU.
class SimulatedAccelerator : public testing::Test {
 protected:
  void SetUp() override { accelerator::needs_simulation("it is of the simulation itself"); }
};
class SimulatedNccl : public SimulatedAccelerator {};

TEST_F(SimulatedAccelerator, OperatorsGiveTheNumbersOfTheCpu) {
  const Simulation simulation;
  torch::manual_seed(3);
  const at::Tensor x = torch::randn({6, 5}), w = torch::randn({4, 5});
  auto chain = [&](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor y = torch::layer_norm(torch::linear(a, b).relu(), {4}) + a.narrow(1, 0, 4);
    return torch::cat({y.softmax(1), y.t().contiguous().view({6, 4}).cumsum(0), y.masked_fill(y > 0, 2.0)}, 1);
  };
  EXPECT_TRUE(torch::equal(chain(x.to(kDevice), w.to(kDevice)).cpu(), chain(x, w)));
  EXPECT_EQ(torch::arange(5, kDevice).sum().item<int64_t>(), 10);
  EXPECT_EQ(x.to(kDevice).nonzero().size(0), 30);
  EXPECT_TRUE(Simulation::findings().empty()) << Simulation::findings()[0];
}

TEST_F(SimulatedAccelerator, KernelsRunBehindTheHost) {
  const Simulation simulation;
  const c10::Stream side = new_stream();
  at::Tensor x = torch::zeros({1}, kDevice);
  order(current_stream(), side);
  const accelerator::Point gate;
  accelerator::block(accelerator::stream_of(0, side.id()), gate);
  c10::StreamGuard on(side);
  for (int i = 0; i < 20; ++i) x.add_(1);
  c10::Event end(at::kCUDA);
  end.record(side);
  EXPECT_FALSE(end.query());
  gate.reached->come();
  EXPECT_EQ(x.item<float>(), 20);
}

TEST_F(SimulatedAccelerator, FindsWhatNothingOrders) {
  const Simulation simulation;
  const c10::Stream side = new_stream();
  at::Tensor x = torch::zeros({8}, kDevice);
  {
    c10::StreamGuard on(side);
    x.narrow(0, 4, 4).add_(1);
  }
  expect_found("write by aten::add_", "write by aten::zero_");
}

TEST_F(SimulatedAccelerator, AcceptsWhatAnEventOrders) {
  const Simulation simulation;
  const c10::Stream side = new_stream();
  at::Tensor x = torch::zeros({8}, kDevice);
  order(current_stream(), side);
  {
    c10::StreamGuard on(side);
    x.narrow(0, 4, 4).add_(1);
  }
  x.narrow(0, 0, 4).add_(1);  // writes to another part of x, so needs no order
  order(side, current_stream());
  EXPECT_EQ(x.sum().item<float>(), 8);
  EXPECT_TRUE(Simulation::findings().empty()) << Simulation::findings()[0];
}

// The caching allocator reuses memory for its own stream at once, unless uses by other streams are recorded.
TEST_F(SimulatedAccelerator, FindsMemoryThatIsFreedTooSoon) {
  for (bool is_recorded : {false, true}) {
    const Simulation simulation;
    const c10::Stream side = new_stream();
    at::Tensor x = torch::zeros({8}, kDevice), sum;
    order(current_stream(), side);
    {
      c10::StreamGuard on(side);
      sum = x.sum();
      if (is_recorded) x.record_stream(side);
    }
    x.reset();
    EXPECT_EQ(Simulation::findings().empty(), is_recorded);
    if (!is_recorded) expect_found("read by aten::sum", "given back");
  }
}

TEST_F(SimulatedAccelerator, FindsAHostThatDoesNotWait) {
  const Simulation simulation({.longest_delay_us = 20000});
  const at::Tensor x = torch::ones({8}, kDevice);
  at::Tensor host = torch::empty({8}, at::TensorOptions().pinned_memory(true));
  host.copy_(x, /*non_blocking=*/true);
  host.sum();
  expect_found("the host touches page-locked memory", "write by copy_");
}

TEST_F(SimulatedAccelerator, CountsHostSynchronisations) {
  const Simulation simulation;
  at::Tensor host = torch::ones({8}, at::TensorOptions().pinned_memory(true));
  at::Tensor x = torch::empty({8}, kDevice);
  c10::Event end(at::kCUDA);
  x.copy_(host, /*non_blocking=*/true);
  x.mul_(2).add_(x);
  end.record(current_stream());
  EXPECT_EQ(Simulation::counts(0).host_waits, 0);
  EXPECT_EQ(Simulation::counts(0).launches, 3);
  end.synchronize();
  EXPECT_EQ(x.sum().item<float>(), 32);
  x.to(at::kCPU);
  x.copy_(torch::ones({8}));
  EXPECT_EQ(Simulation::counts(0).host_waits, 4);
}

TEST_F(SimulatedAccelerator, DevicesHaveGeneratorsOfTheirOwn) {
  const Simulation simulation;
  torch::manual_seed(5);
  const at::Tensor first = torch::rand({4}, kDevice), other = torch::rand({4}, at::Device(at::kCUDA, 1));
  const at::Tensor next = torch::rand({4}, kDevice);
  EXPECT_TRUE(torch::equal(first.cpu(), other.cpu()));
  EXPECT_FALSE(torch::equal(first.cpu(), next.cpu()));
}

// ---- groups -------------------------------------------------------------------------------------

TEST_F(SimulatedNccl, GivesWhatTheCommunicatorPromises) {
  for (int world : {2, 3, 4}) {
    const Simulation simulation;
    accelerator::on_devices(world, [&](std::shared_ptr<Communicator> comm) {
      const int rank = comm->rank();
      const auto options = at::TensorOptions().device(comm->device());
      const std::vector<int64_t> uneven = {3, 0, 5, 1};
      const std::vector<int64_t> counts(uneven.begin(), uneven.begin() + world);
      int64_t total = 0, begin = 0;
      for (int r = 0; r < world; ++r) (r == rank ? begin = total : 0), total += counts[r];
      const at::Tensor all = torch::arange(total, options.dtype(at::kFloat));
      const at::Tensor own = all.narrow(0, begin, counts[rank]).clone();

      at::Tensor full = torch::empty({total}, options);
      comm->all_gather(full, own, counts).wait();
      EXPECT_TRUE(torch::equal(full.cpu(), all.cpu()));
      at::Tensor shard = torch::empty({counts[rank]}, options);
      comm->reduce_scatter(shard, all * (rank + 1), ReduceOp::kSum, counts).wait();
      EXPECT_TRUE(torch::equal(shard.cpu(), own.cpu() * (world * (world + 1) / 2)));
      shard.zero_();
      comm->scatter(shard, rank == 1 ? all + 1 : at::Tensor(), 1, counts).wait();
      EXPECT_TRUE(torch::equal(shard.cpu(), own.cpu() + 1));
      at::Tensor sent = all + rank;
      comm->broadcast(sent, 1).wait();
      EXPECT_TRUE(torch::equal(sent.cpu(), all.cpu() + 1));
      at::Tensor mean = all * rank;
      comm->all_reduce(mean, ReduceOp::kAverage).wait();
      EXPECT_TRUE(torch::equal(mean.cpu(), all.cpu() * (world * (world - 1) / 2) / world));
      comm->barrier();
      auto part = comm->split(rank % 2 == 0 ? 0 : -1, -rank);
      EXPECT_EQ(part != nullptr, rank % 2 == 0);
      if (part == nullptr) return;
      at::Tensor sum = torch::ones({2}, options) * rank;
      part->all_reduce(sum).wait();
      EXPECT_EQ(sum.sum().item<float>(), world > 2 ? 4 : 0);
    });
    EXPECT_TRUE(Simulation::findings().empty()) << Simulation::findings()[0];
  }
}

// Counts host waits as on a GPU, where the host waits only for values and for sizes that depend on values.
TEST_F(SimulatedAccelerator, CountsWhatStopsTheHost) {
  const Simulation simulation;
  const at::Device device(at::kCUDA, 0);
  const at::Tensor x = torch::arange(6, at::TensorOptions(device).dtype(at::kFloat));
  const at::Tensor mask = x > 2, positions = torch::zeros({3}, at::TensorOptions(device).dtype(at::kLong));
  const auto waits = [&](const auto& act) {
    const int64_t before = Simulation::counts(0).host_waits;
    act();
    return Simulation::counts(0).host_waits - before;
  };
  EXPECT_EQ(waits([&] { x.sum().item<float>(); }), 1);
  EXPECT_EQ(waits([&] { x.sum().is_nonzero(); }), 1);
  EXPECT_EQ(waits([&] { x.nonzero(); }), 1);
  EXPECT_EQ(waits([&] { x.masked_select(mask); }), 1);
  EXPECT_EQ(waits([&] { x.index({mask}); }), 1);
  EXPECT_EQ(waits([&] { x.clone().index_put_({mask}, torch::ones({3}, device)); }), 1);
  EXPECT_EQ(waits([&] { x.clone().index_put_({mask}, torch::tensor(1.0F)); }), 0);
  EXPECT_EQ(waits([&] { x.index({positions}); }), 0);
  EXPECT_EQ(waits([&] { x.masked_fill(mask, 0).where(mask, x).index_select(0, positions); }), 0);
}

TEST_F(SimulatedNccl, DoesNotStopTheHost) {
  const Simulation simulation;
  accelerator::on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    at::Tensor x = torch::ones({4}, comm->device());
    comm->all_reduce(x).wait();
    x.mul_(2);
    EXPECT_EQ(Simulation::counts(comm->rank()).host_waits, 0);
    EXPECT_EQ(x.sum().item<float>(), 16);
  });
}

TEST_F(SimulatedNccl, FindsAResultThatIsReadTooSoon) {
  const Simulation simulation;
  accelerator::on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    at::Tensor x = torch::ones({4}, comm->device());
    auto pending = comm->all_reduce(x, ReduceOp::kSum, "x");
    const at::Tensor early = x * 2;
    pending.wait();
  });
  expect_found("read by aten::mul", "all-reduce of 4 elements");
}

TEST_F(SimulatedNccl, FindsUnequalSizes) {
  const Simulation simulation;
  EXPECT_NE(error_of<CommError>([] {
              accelerator::on_devices(
                  2,
                  [&](std::shared_ptr<Communicator> comm) {
                    at::Tensor x = torch::ones({4 + comm->rank()}, comm->device());
                    comm->all_reduce(x).wait();
                    x.cpu();
                    comm->barrier();
                  },
                  std::chrono::seconds(5));
            }),
            "");
  expect_found("all-reduce of 4 elements on rank", "all-reduce of 5 elements on rank");
}

}  // namespace
}  // namespace tessera::simulation_test
