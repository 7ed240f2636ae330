// Tests of memory with devices: page-locked memory, checkpoints, prefetched units, memory registered with NCCL.
#include "core/memory/pinned_pool.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/runtime/copy_engine.h"
#include "tests/accelerator/simulated_training.h"
#include "tests/support/temporary_folder.h"

namespace tessera::accelerator_memory_test {
using namespace internal;
namespace {

using namespace accelerator_training;
using accelerator::Simulation;
using testing_support::error_of;
using testing_support::expect_contains;
using testing_support::seeded;
using testing_support::TemporaryFolder;

void expect_no_findings() {
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

torch::nn::Sequential chain(int layers, int64_t features) {
  return seeded(3, [&] {
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(features, features));
    return net;
  });
}

// libtorch's allocator would round sizes up to the next power of two, to nearly twice as much.
TEST(AcceleratorMemory, PageLockedMemoryIsExact) {
  const Simulation simulation;
  const at::Device device(at::kCUDA, 0);
  constexpr int64_t kBytes = (int64_t{1} << 20) + 100, kInPages = (int64_t{1} << 20) + 4096;
  const int64_t before = accelerator::page_locked_bytes();
  {
    PinnedPool pool({.device = device, .limit_bytes = 2 * kInPages});
    const at::Tensor first = pool.take(kBytes, at::kByte, "a test"), second = pool.take(kBytes, at::kByte, "a test");
    EXPECT_EQ(accelerator::page_locked_bytes() - before, 2 * kInPages);
    EXPECT_EQ(pool.lent_bytes(), 2 * kInPages);
    // A limit counts whole pages, so two allocations do not fit into twice their requested bytes.
    PinnedPool tight({.device = device, .limit_bytes = 2 * kBytes});
    const at::Tensor third = tight.take(kBytes, at::kByte, "a test");
    expect_contains(error_of<std::runtime_error>([&] { tight.take(kBytes, at::kByte, "a test"); }), "of at most");
    expect_contains(error_of<std::runtime_error>([&] { pool.take(1, at::kByte, "a test"); }), "of at most");
  }
  EXPECT_EQ(accelerator::page_locked_bytes(), before);
  expect_no_findings();
}

TEST(AcceleratorMemory, PageLockedMemoryIsUsedAgain) {
  const Simulation simulation;
  PinnedPool pool({.device = at::Device(at::kCUDA, 0)});
  const void* const memory = pool.take(100, at::kFloat, "a test").data_ptr();
  EXPECT_EQ(pool.owned_bytes(), 4096);
  const at::Tensor again = pool.take(200, at::kBFloat16, "a test");
  EXPECT_EQ(again.data_ptr(), memory);
  EXPECT_EQ(pool.owned_bytes(), 4096);
  for (int64_t pages = 1; pages <= 8; ++pages) pool.take(pages * 1024 - 1, at::kFloat, "a test");
  EXPECT_LE(pool.owned_bytes(), 9 * 4096);
  EXPECT_EQ(pool.peak_lent_bytes(), 9 * 4096);
  expect_no_findings();
}

// Freed memory returns to the driver, which does not wait for streams. So the memory must outlive copies in flight.
TEST(AcceleratorMemory, PageLockedMemoryOutlivesItsCopies) {
  const Simulation simulation({.longest_delay_us = 20000});
  const at::Device device(at::kCUDA, 0);
  const auto engine = CopyEngine::make(device);
  const at::Tensor there = torch::ones({5000}, device);
  for (int i = 0; i < 4; ++i) {
    PinnedPool pool({.device = device});
    auto copy = engine->to_host(pool.take(5000, at::kFloat, "a test"), there);
  }
  expect_no_findings();
}

class AcceleratorSaves : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(CopyInBackground, AcceleratorSaves, testing::Bool());

// Training continues at once, and must not change the saved values. Copies do not block the host, because they go
// directly to page-locked memory, which has the exact size.
TEST_P(AcceleratorSaves, ASaveInTheBackgroundCopiesBesideTheLoop) {
  const bool in_background = GetParam();
  for (const uint64_t seed : accelerator::seeds(2)) {
    const TemporaryFolder folder;
    const Simulation simulation({.seed = seed, .longest_delay_us = 2000});
    accelerator::on_devices(std::min(2, accelerator::device_count()), [&](std::shared_ptr<Communicator> comm) {
      auto net = chain(3, 40);
      net->to(comm->device());
      FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      torch::optim::AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
      const at::Tensor x = torch::ones({4, 40}, comm->device());
      auto backward = [&] {
        optimizer.zero_grad();
        fsdp(x).square().sum().backward();
      };
      backward();
      optimizer.step();
      backward();
      optimizer.step();
      const auto expected = fsdp.full_state_dict();
      const auto before = Simulation::counts(comm->rank());
      auto pending =
          save_checkpoint_async(folder.path() / "saved", fsdp, optimizer, {}, {.copy_in_background = in_background});
      backward();
      pending.copied();
      optimizer.step();
      backward();
      optimizer.step();
      pending.wait();
      for (const auto& [place, times] : Simulation::counts(comm->rank()).wait_places)
        if (place.find("HostCopies::copy") != std::string::npos ||
            place.find("HostCopies::begin") != std::string::npos) {
          const auto known = before.wait_places.find(place);
          EXPECT_EQ(times, known == before.wait_places.end() ? 0 : known->second) << place;
        }
      load_checkpoint(folder.path() / "saved", fsdp, optimizer);
      const auto loaded = fsdp.full_state_dict();
      for (const auto& entry : expected)
        EXPECT_TRUE(torch::equal(entry.value().cpu(), loaded[entry.key()].cpu())) << entry.key();
      // A thread that used another device's events would make CUDA create a context on device 0.
      EXPECT_EQ(Simulation::counts(comm->rank()).events_elsewhere, 0);
    });
    expect_no_findings();
  }
}

// Tests one and several units, with casts or without. All ranks or one rank read and change parameters on the host.
TEST(AcceleratorMemory, FullParametersMayBeSummonedToTheHost) {
  const Simulation simulation;
  for (const int world : {1, 2})
    for (const bool is_cast : {false, true})
      accelerator::on_devices(world, [&](std::shared_ptr<Communicator> comm) {
        auto net = chain(3, 40);
        const auto reference = chain(3, 40);
        net->to(comm->device());
        FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
        if (is_cast) options.mixed_precision.param_dtype = at::kBFloat16;
        FullyShardedDataParallel fsdp(net, comm, options);
        torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
        const at::Tensor x = torch::ones({4, 40}, comm->device());
        auto train = [&] {
          optimizer.zero_grad();
          fsdp(x).square().sum().backward();
          optimizer.step();
        };
        const auto expect_values = [&](double changed_to, const char* when) {
          const auto state = fsdp.full_state_dict({.offload_to_cpu = true});
          for (const auto& entry : reference->named_parameters())
            EXPECT_TRUE(torch::equal(state[entry.key()], entry.key() == "1.bias"
                                                             ? torch::full_like(entry.value(), changed_to)
                                                             : entry.value().detach()))
                << entry.key() << " " << when;
        };
        {
          auto scope = fsdp.summon_full_params({.offload_to_cpu = true});
          EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
          torch::NoGradGuard no_grad;
          for (const auto& entry : reference->named_parameters()) {
            const at::Tensor summoned = net->named_parameters()[entry.key()];
            EXPECT_TRUE(summoned.is_cpu());
            EXPECT_TRUE(torch::equal(summoned, entry.value())) << entry.key();
          }
          net->named_parameters()["1.bias"].fill_(3);
          expect_contains(error_of<std::logic_error>([&] { fsdp(x); }), "the parameters are in host memory");
        }
        for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.device(), comm->device());
        expect_values(3, "after a change");
        {
          auto scope = fsdp.summon_full_params({.writeback = false, .offload_to_cpu = true});
          torch::NoGradGuard no_grad;
          net->named_parameters()["1.bias"].fill_(4);
        }
        expect_values(3, "after one that is lost");
        {
          auto scope = fsdp.summon_full_params({.writeback = false, .rank0_only = true, .offload_to_cpu = true});
          if (comm->rank() == 0) {
            EXPECT_TRUE(net->parameters()[0].is_cpu());
          }
        }
        // Training continues with all gradients.
        train();
        const auto trained = fsdp.full_state_dict({.offload_to_cpu = true});
        for (const auto& entry : reference->named_parameters())
          EXPECT_FALSE(torch::equal(trained[entry.key()], entry.value())) << entry.key();
      });
  expect_no_findings();
}

// A device without an index is the thread's current device.
TEST(AcceleratorMemory, ADeviceNeedsNoIndex) {
  const Simulation simulation;
  const c10::DeviceGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(accelerator::device_count() - 1)));
  PeakMemory memory(at::kCUDA);
  const int64_t before = memory.current_bytes();
  const at::Tensor x = torch::ones({1024}, at::kCUDA).requires_grad_();
  EXPECT_GE(memory.current_bytes() - before, 4096);
  ActivationOffload activations(at::kCUDA, {.min_bytes = 0});
  at::Tensor y;
  {
    const ActivationOffload::Scope scope(activations);
    y = checkpointed([](const at::Tensor& in) { return in.square(); }, x * 2);
  }
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad().cpu(), torch::full({1024}, 8.0)));
  expect_no_findings();
}

// A load replaces the existing tensors one after another, so it never holds a second state of the whole optimizer.
TEST(AcceleratorMemory, ALoadKeepsNoSecondOptimizerState) {
  const TemporaryFolder folder;
  const Simulation simulation;
  accelerator::on_devices(1, [&](std::shared_ptr<Communicator> comm) {
    auto net = chain(6, 64);
    net->to(comm->device());
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    torch::optim::AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
    fsdp(torch::ones({4, 64}, comm->device())).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    save_checkpoint(folder.path() / "saved", fsdp, optimizer);
    constexpr int64_t kLayerBytes = 64 * 65 * 4;
    PeakMemory memory(comm->device());
    const int64_t before = memory.current_bytes();
    load_checkpoint(folder.path() / "saved", fsdp, optimizer);
    EXPECT_LE(memory.peak_bytes() - before, 2 * kLayerBytes);  // at most a second state of one parameter at a time
    EXPECT_LE(memory.current_bytes(), before);
  });
  expect_no_findings();
}

// A host that runs ahead of a late device needs no more memory: after the first steps, gathers reuse memory whose
// earlier use is ordered before them.
TEST(AcceleratorMemory, AHostThatRunsAheadTakesNoMoreMemory) {
  accelerator::needs_simulation("CUDA's allocator takes 2 MiB at a time");
  const Simulation simulation({.longest_delay_us = 1000});
  constexpr int64_t kFeatures = 128, kUnitBytes = kFeatures * (kFeatures + 1) * 4;
  accelerator::on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = chain(6, kFeatures);
    net->to(comm->device());
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .prefetch = 2});
    torch::optim::SGD optimizer(fsdp.parameters(), 1e-2);
    const at::Tensor x = torch::ones({4, kFeatures}, comm->device());
    auto step = [&] {
      optimizer.zero_grad();
      fsdp(x).square().sum().backward();
      optimizer.step();
    };
    for (int i = 0; i < 3; ++i) step();
    const int64_t reserved = accelerator::reserved_bytes(comm->rank());
    fsdp.reset_peak_memory();
    for (int i = 0; i < 4; ++i) step();
    // Permits some bytes for small reports between ranks, some of which may be in flight.
    EXPECT_LE(accelerator::reserved_bytes(comm->rank()) - reserved, kUnitBytes / 4);
    // Two recent and two prefetched units.
    EXPECT_LE(fsdp.memory().peak_gathered_bytes, (2 + 2) * fsdp.memory().largest_unit_bytes);
  });
  expect_no_findings();
}

// The loss and its gradient, which may be large, meet one unit.
TEST(AcceleratorMemory, OneUnitIsUnshardedBetweenForwardAndBackward) {
  const Simulation simulation;
  accelerator::on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = chain(9, 16);
    net->to(comm->device());
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    const at::Tensor x = torch::ones({4, 16}, comm->device());
    for (int i = 0; i < 2; ++i) {
      const at::Tensor loss = fsdp(x).square().sum();
      EXPECT_EQ(fsdp.memory().gathered_bytes, fsdp.memory().largest_unit_bytes);
      loss.backward();
      EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
    }
  });
  expect_no_findings();
}

TEST(AcceleratorMemory, GathersGoToRegisteredMemoryIfAskedTo) {
  accelerator::needs_simulation("not every GPU has such memory, and nobody counts what uses it");
  InitOptions options;
  options.timeout = std::chrono::seconds(60);
  for (const bool registered : {true, false}) {
    options.registered_memory = registered;
    const Case& of = case_named(registered ? "fsdp_hybrid" : "fsdp");
    const Simulation simulation;
    EXPECT_EQ(difference(train_on_gloo(of), train_on_devices(of, options)), "");
    // At least three steps with gathers of four units and of the rest of the model.
    EXPECT_GE(Simulation::counts(0).registered_collectives, registered ? 3 * 5 : 0);
    EXPECT_EQ(Simulation::counts(0).registered_collectives > 0, registered);
    expect_no_findings();
  }
}

}  // namespace
}  // namespace tessera::accelerator_memory_test
