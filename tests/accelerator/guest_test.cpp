// Groups of the program's own ranks on devices: the caller's device and streams stay as they are.
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <thread>

#include "tests/accelerator/simulated_training.h"
#include "tests/support/accelerator/backend.h"

namespace tessera::accelerator_guest_test {
using namespace internal;
namespace {

using accelerator::Simulation;

c10::DeviceIndex current_device() { return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index(); }

// Trains on the rank's current device and a stream of the program's own. Returns how often the host has waited.
void train_as_guest(const std::shared_ptr<Communicator>& comm) {
  const c10::impl::VirtualGuardImpl devices(at::kCUDA);
  const c10::StreamGuard guard(devices.getNewStream(comm->device(), 0));
  const c10::Stream stream = guard.current_stream();
  auto model = torch::nn::Linear(8, 8);
  model->to(comm->device());
  DistributedDataParallel ddp(model, comm);
  FullyShardedDataParallel fsdp(torch::nn::Linear(8, 8), comm);
  torch::optim::SGD optimizer(model->parameters(), 0.1), sharded(fsdp.parameters(), 0.1);
  const at::Tensor x = torch::ones({4, 8}, comm->device());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    sharded.zero_grad();
    (ddp(x).square().mean() + fsdp(x).square().mean()).backward();
    optimizer.step();
    sharded.step();
  }
  EXPECT_EQ(current_device(), comm->device().index());
  EXPECT_EQ(devices.getStream(comm->device()), stream);
}

TEST(GuestOnDevices, UsesTheCallersDeviceAndStream) {
  const Simulation simulation;
  accelerator::needs_devices(2);
  set_nccl_backends(accelerator::device_groups());
  for (const bool is_given : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank)
      ranks.emplace_back([&, rank] {
        const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(1 - rank));
        const c10::DeviceGuard guard(device);
        GroupOptions options{.device = at::kCUDA, .timeout = std::chrono::seconds(60)};
        std::shared_ptr<Communicator> comm;
        if (is_given) {
          c10::intrusive_ptr<c10d::Backend> backend = accelerator::device_groups()->make(
              c10::make_intrusive<c10d::PrefixStore>("program", store), rank, 2, device, options.timeout);
          comm = communicator_from(backend, options);
          comm->split(0);
        } else {
          comm = communicator_from(store, rank, 2, options);
        }
        EXPECT_EQ(comm->device(), device);
        train_as_guest(comm);
        comm.reset();
        EXPECT_EQ(current_device(), device.index());
      });
    for (std::thread& rank : ranks) rank.join();
  }
}

}  // namespace
}  // namespace tessera::accelerator_guest_test
