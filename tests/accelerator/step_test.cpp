// Tests the cost of a step on an accelerator (host synchronisations and launches), and which uses are refused.
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/runtime/stream_uses.h"
#include "tests/accelerator/simulated_training.h"

namespace tessera::accelerator_step_test {
using namespace internal;
namespace {

using accelerator::Simulation;
using testing_support::error_of;
using testing_support::expect_contains;
using testing_support::seeded;

constexpr int64_t kFeatures = 16;

torch::nn::Sequential chain(int layers) {
  return seeded(3, [&] {
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(kFeatures, kFeatures));
    return net;
  });
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x) { return c(b(a(x))); }
  torch::nn::Linear a{kFeatures, kFeatures}, b{kFeatures, 5}, c{5, kFeatures};
};
TORCH_MODULE(Block);

// Returns the cost of the fourth step on this rank's device.
template <class Wrapper>
accelerator::Counts cost_of_a_step(Wrapper& wrapper, torch::optim::Optimizer& optimizer, Communicator& comm,
                                   bool clips) {
  const at::Tensor x = torch::ones({4, kFeatures}, comm.device());
  accelerator::Counts before;
  for (int step = 0; step < 4; ++step) {
    if (step == 3) before = Simulation::counts(comm.rank());
    optimizer.zero_grad();
    wrapper(x).square().sum().backward();
    if (clips) wrapper.clip_grad_norm_on_device_(0.1);
    optimizer.step();
  }
  accelerator::Counts cost = Simulation::counts(comm.rank());
  cost.host_waits -= before.host_waits;
  cost.launches -= before.launches;
  for (auto& [place, times] : cost.wait_places) times -= before.wait_places[place];
  for (auto& [name, times] : cost.launch_names) times -= before.launch_names[name];
  return cost;
}

void expect_no_wait(const accelerator::Counts& cost) {
  EXPECT_EQ(cost.host_waits, 0);
  for (const auto& [place, times] : cost.wait_places) EXPECT_EQ(times, 0) << place;
}

TEST(AcceleratorStep, DoesNotStopTheHost) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    const torch::optim::AdamWOptions adam(1e-2);
    {
      auto net = chain(3);
      net->to(comm->device());
      FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      torch::optim::AdamW optimizer(fsdp.parameters(), adam);
      expect_no_wait(cost_of_a_step(fsdp, optimizer, *comm, true));
    }
    {
      auto net = chain(3);
      net->to(comm->device());
      OSS<torch::optim::AdamW> optimizer(net->parameters(), adam, comm);
      ShardedDataParallel sdp(net, optimizer, comm);
      expect_no_wait(cost_of_a_step(sdp, optimizer, *comm, true));
    }
    {
      auto net = chain(3);
      net->to(comm->device());
      DistributedDataParallel ddp(net, comm);
      torch::optim::AdamW optimizer(net->parameters(), adam);
      expect_no_wait(cost_of_a_step(ddp, optimizer, *comm, true));
    }
  });
}

// With offload, streams wait for the copies of shards, and the host waits once for each gradient.
TEST(AcceleratorStep, OffloadStopsTheHostOnceAGradient) {
  const Simulation simulation;
  accelerator::on_devices(std::min(2, accelerator::device_count()), [](std::shared_ptr<Communicator> comm) {
    for (const int layers : {3, 5}) {
      auto net = chain(layers);
      net->to(comm->device());
      FullyShardedDataParallel fsdp(
          net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}});
      HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
      const auto cost = cost_of_a_step(fsdp, optimizer, *comm, false);
      std::string places;
      for (const auto& [place, times] : cost.wait_places)
        if (times > 0) places += "\n" + place + " " + std::to_string(times);
      EXPECT_EQ(cost.host_waits, layers) << places;
    }
  });
}

// All gradients share one flag, so the number of launches does not depend on the number of gradients.
TEST(AcceleratorStep, CheckFiniteStopsTheHostOnceAndCostsTheSameForAllGradients) {
  accelerator::needs_simulation("it counts launches");
  const Simulation simulation;
  accelerator::on_devices(2, [](std::shared_ptr<Communicator> comm) {
    std::vector<int64_t> launches;
    for (const int layers : {3, 6}) {
      std::map<bool, accelerator::Counts> cost;
      for (const bool checks : {false, true}) {
        auto net = chain(layers);
        net->to(comm->device());
        FullyShardedDataParallel fsdp(net, comm,
                                      {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .check_finite = checks});
        torch::optim::AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
        cost[checks] = cost_of_a_step(fsdp, optimizer, *comm, true);
      }
      EXPECT_EQ(cost[true].host_waits, 1);
      launches.push_back(cost[true].launches - cost[false].launches);
    }
    EXPECT_EQ(launches[0], launches[1]);
  });
}

// One launch computes the norms of all gradients, and another one stacks them.
TEST(AcceleratorStep, ClippingCostsTheSameForAllGradients) {
  accelerator::needs_simulation("it counts launches");
  const Simulation simulation;
  accelerator::on_devices(2, [](std::shared_ptr<Communicator> comm) {
    std::map<int, std::vector<int64_t>> of_clipping;  // by number of layers
    for (const int layers : {3, 6}) {
      std::map<bool, std::vector<int64_t>> launches;  // by whether the step clips
      for (const bool clips : {false, true}) {
        auto replica = chain(layers), sharded = chain(layers);
        replica->to(comm->device());
        sharded->to(comm->device());
        DistributedDataParallel ddp(replica, comm);
        FullyShardedDataParallel fsdp(sharded, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
        torch::optim::SGD of_ddp(ddp.parameters(), 1e-2), of_fsdp(fsdp.parameters(), 1e-2);
        launches[clips] = {cost_of_a_step(ddp, of_ddp, *comm, clips).launches,
                           cost_of_a_step(fsdp, of_fsdp, *comm, clips).launches};
      }
      for (size_t i = 0; i < 2; ++i) of_clipping[layers].push_back(launches[true][i] - launches[false][i]);
    }
    EXPECT_EQ(of_clipping[3], of_clipping[6]);
    // DDP, whose ranks reduce nothing: norms, a stack, their norm, four for the factor, a product.
    EXPECT_LE(of_clipping[3][0], 10);
  });
}

// A checkpointed part runs a nested backward on the stream of its forward. The stream of backward() must wait for it.
TEST(AcceleratorStep, ACheckpointedPartOrdersItsGradientsBeforeTheCallersStream) {
  const Simulation simulation;
  const at::Device device(at::kCUDA, 0);
  at::Tensor weight = torch::ones({64, 64}, device).requires_grad_();
  const at::Tensor loss =
      checkpointed([&](const at::Tensor& in) { return in.mm(weight); }, torch::ones({64, 64}, device)).sum();
  const c10::Stream other = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device);
  order_streams(current_stream(device), other);
  {
    const c10::StreamGuard on(other);
    loss.record_stream(other);
    loss.backward();
    EXPECT_EQ(weight.grad().sum().item<float>(), 64.0F * 64 * 64);
  }
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// Reductions of a failed backward end on the stream of the next forward. Their memory belongs to another stream.
TEST(AcceleratorStep, AFailedBackwardOnAnotherStreamLeavesNoRace) {
  accelerator::needs_simulation("it needs two devices");
  const Simulation simulation;
  accelerator::on_devices(2, [](std::shared_ptr<Communicator> comm) {
    auto net = chain(4);
    net->to(comm->device());
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    torch::optim::SGD optimizer(fsdp.parameters(), 1e-2);
    bool fails = false;
    net->parameters()[2].register_hook([&](const at::Tensor&) {
      if (fails) throw std::runtime_error("the hook's own");
    });
    const c10::Stream home = current_stream(comm->device());
    const c10::Stream other = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(comm->device());
    for (int i = 0; i < 8; ++i) {
      fails = i % 4 == 2;
      order_streams(home, other);
      {
        const c10::StreamGuard on(i % 2 == 0 ? home : other);
        optimizer.zero_grad();
        const at::Tensor loss = fsdp(torch::ones({4, kFeatures}, comm->device())).square().sum();
        const std::string error = error_of<std::runtime_error>([&] { loss.backward(); });
        EXPECT_EQ(error, fails ? "the hook's own" : "");
        if (!fails) optimizer.step();
      }
      order_streams(other, home);
    }
  });
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// Stands in for a wrapper, to measure the cost of a step without wrappers.
struct Plain {
  at::Tensor operator()(const at::Tensor& x) { return net->forward(x); }
  void clip_grad_norm_on_device_(double) { throw std::logic_error("a plain loop does not clip"); }
  torch::nn::Sequential net;
};

// A further unit costs two gathers, a reduction, the kernels of its modules, and a few launches, whose number does not
// depend on the number of its parameters.
TEST(AcceleratorStep, AUnitCostsAFewLaunches) {
  accelerator::needs_simulation("it counts launches");
  const Simulation simulation;
  std::map<int, int64_t> launches, all, plain;
  for (const int layers : {3, 4}) {
    accelerator::on_devices(2, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Sequential net;
      for (int i = 0; i < layers; ++i) net->push_back(Block());
      net->to(comm->device());
      FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<BlockImpl>()});
      torch::optim::SGD optimizer(fsdp.parameters(), 1e-2);
      const auto cost = cost_of_a_step(fsdp, optimizer, *comm, false);
      if (comm->rank() == 0) all[layers] = cost.launches;
      if (comm->rank() == 0)
        for (const auto& [name, times] : cost.launch_names)
          if (name.find("copy_") != std::string::npos || name.find("zero_") != std::string::npos ||
              name.find("aten::fill_") != std::string::npos)
            launches[layers] += times;
    });
  }
  // One launch copies the unit's six gradients into the bucket, and one launch clears all gaps between them.
  EXPECT_LE(launches[4] - launches[3], 2);
  for (const int layers : {3, 4}) {
    accelerator::on_devices(1, [&](std::shared_ptr<Communicator> comm) {
      Plain loop;
      for (int i = 0; i < layers; ++i) loop.net->push_back(Block());
      loop.net->to(comm->device());
      torch::optim::SGD optimizer(loop.net->parameters(), 1e-2);
      plain[layers] = cost_of_a_step(loop, optimizer, *comm, false).launches;
    });
  }
  RecordProperty("launches_of_a_unit", static_cast<int>(all[4] - all[3]));
  RecordProperty("of_the_same_without_a_wrapper", static_cast<int>(plain[4] - plain[3]));
  EXPECT_LE(all[4] - all[3], plain[4] - plain[3] + 6);
}

// An input changes after its copy to the host has started. This is an error, whether or not the copy has completed.
TEST(AcceleratorStep, AnInputThatChangesAfterItWasKeptIsRefused) {
  const Simulation simulation;
  const at::Device device(at::kCUDA, 0);
  ActivationOffload activations(device, {.min_bytes = 0});
  at::Tensor weight = torch::ones({4}, device).requires_grad_();
  at::Tensor x = torch::ones({4}, device) * weight, y;
  {
    ActivationOffload::Scope scope(activations);
    y = checkpointed([&](const at::Tensor& in) { return in * weight; }, x);
  }
  {
    at::NoGradGuard no_grad;
    x.mul_(3);
  }
  expect_contains(error_of<std::invalid_argument>([&] { y.sum().backward(); }),
                  "has been modified by an inplace operation");
}

// The recomputation of a checkpointed part must draw the same random numbers on its device as the first forward.
TEST(AcceleratorStep, ACheckpointedPartDrawsTheSameNumbersAgain) {
  const Simulation simulation;
  accelerator::needs_devices(2);
  const at::Device device(at::kCUDA, 1);
  torch::manual_seed(1);
  at::Tensor x = torch::ones({64}, device).requires_grad_();
  const at::Tensor y = checkpointed([](const at::Tensor& in) { return torch::dropout(in, 0.5, true); }, x);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(y.detach().cpu(), x.grad().cpu()));
}

// The same must hold if the part's inputs are on another device, such as indices on the CPU.
TEST(AcceleratorStep, ACheckpointedPartDrawsTheSameNumbersOnTheThreadsDevice) {
  const Simulation simulation;
  accelerator::needs_devices(2);
  const at::Device device(at::kCUDA, 1);
  const c10::DeviceGuard guard(device);
  torch::manual_seed(1);
  at::Tensor weight = torch::ones({64}, device).requires_grad_();
  const at::Tensor indices = torch::arange(64);
  const at::Tensor y = checkpointed(
      [&](const at::Tensor& in) { return torch::dropout(weight, 0.5, true) * in.to(device).clamp(1, 1); }, indices);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(y.detach().cpu(), weight.grad().cpu()));
}

// The same must hold if only the outputs are on another device, as in a model that is split over devices.
TEST(AcceleratorStep, ACheckpointedPartDrawsTheSameNumbersOnItsOutputsDevice) {
  const Simulation simulation;
  accelerator::needs_devices(3);
  torch::manual_seed(1);
  at::Tensor x = torch::ones({64}, at::Device(at::kCUDA, 0)).requires_grad_();
  const at::Tensor y =
      checkpointed([](const at::Tensor& in) { return torch::dropout(in.to(at::Device(at::kCUDA, 2)), 0.5, true); }, x);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(y.detach().cpu(), x.grad().cpu()));
}

// Until DDP has copied a gradient into its bucket, the gradient must not be changed.
TEST(AcceleratorStep, AGradientThatIsChangedInPlaceAfterItCameIsRefused) {
  const Simulation simulation;
  accelerator::on_devices(2, [](std::shared_ptr<Communicator> comm) {
    struct Net : torch::nn::Module {
      Net() {
        register_module("a", a);
        register_module("b", b);
      }
      at::Tensor forward(const at::Tensor& x) {
        at::Tensor h = a(x);
        h.register_hook([this](const at::Tensor&) -> void { kept.mul_(2); });
        return b(h);
      }
      torch::nn::Linear a{torch::nn::LinearOptions(4, 4).bias(false)}, b{torch::nn::LinearOptions(4, 4).bias(false)};
      at::Tensor kept;  // the gradient of b's weight
    };
    auto net = std::make_shared<Net>();
    net->to(comm->device());
    DistributedDataParallel ddp(net, comm);
    net->b->weight.register_hook([&](const at::Tensor& gradient) -> void { net->kept = gradient; });
    const std::string error =
        error_of<std::logic_error>([&] { ddp(torch::ones({2, 4}, comm->device())).sum().backward(); });
    expect_contains(error, "the gradient of parameter 'b.weight' on rank " + std::to_string(comm->rank()) +
                               " was changed in place");
  });
}

}  // namespace
}  // namespace tessera::accelerator_step_test
