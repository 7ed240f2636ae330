// Tests a group in a program with its own device and streams: Tessera uses them, and leaves them current.
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <tessera/elastic.h>
#include "tests/accelerator/simulated_training.h"
#include "tests/guest/guests.h"
#include "tests/support/temporary_folder.h"

namespace tessera::accelerator_guest_test {
using namespace internal;
namespace {

using accelerator::Simulation;
using namespace testing_support;

constexpr int kWorld = 2;

at::Device device_of(int rank) { return {at::kCUDA, static_cast<c10::DeviceIndex>(rank)}; }

// The current device, and the current streams of all devices.
struct Current {
  static Current now() {
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    Current current{guard.getDevice(), {}};
    for (int device = 0; device < kWorld; ++device) current.streams.push_back(guard.getStream(device_of(device)));
    return current;
  }
  bool operator==(const Current&) const = default;
  at::Device device;
  std::vector<c10::Stream> streams;
};

// The current device and stream of the caller when it makes and uses the group.
enum class Caller { kOnDefaultStream, kOnOwnStream, kOnOtherDevice };

// Trains with a group made from a store. Checks after each call that the caller's device and streams are still current.
// Returns rank 0's parameters, on the host.
std::vector<at::Tensor> train(Wrapper wrapper, Caller caller) {
  std::vector<at::Tensor> result;
  const TemporaryFolder folder;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = on_threads(kWorld, [&](int rank) {
    const c10::DeviceGuard on_device(device_of(caller == Caller::kOnOtherDevice ? 1 - rank : rank));
    const c10::impl::VirtualGuardImpl streams(at::kCUDA);
    const c10::Stream own = caller == Caller::kOnOwnStream ? streams.getStreamFromGlobalPool(device_of(rank), false)
                                                           : streams.getStream(device_of(rank));
    const c10::StreamGuard on_stream(own);  // also makes the stream's device current
    const c10::DeviceGuard again(on_device.current_device());
    const Current before = Current::now();
    const auto check = [&](const char* call) {
      EXPECT_EQ(Current::now() == before, true) << call << ", rank " << rank;
    };
    auto model = std::make_shared<Surrogate>();
    model->to(device_of(rank));
    GroupOptions options{.device = device_of(rank), .timeout = std::chrono::seconds(60)};
    if (caller != Caller::kOnOtherDevice) options.device = at::kCUDA;  // without an index: the current device
    const auto comm = communicator_from(store, rank, kWorld, options);
    check("communicator_from()");
    EXPECT_EQ(comm->device(), device_of(rank));
    const ZeroOptions zero_options{.stage = wrapper == Wrapper::kDdp      ? 0
                                            : wrapper == Wrapper::kOssSdp ? 2
                                                                          : 3,
                                   .fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}};
    auto trained = zero<torch::optim::AdamW>(model, torch::optim::AdamWOptions(1e-2), comm, zero_options);
    check("the wrapper's constructor");
    for (int step = 0; step < 3; ++step) {
      trained.zero_grad();
      check("zero_grad()");
      const at::Tensor loss = trained(inputs_of(rank).to(device_of(rank))).square().mean();
      check("forward()");
      loss.backward();
      check("backward()");
      trained.clip_grad_norm_(0.5);
      check("clip_grad_norm_()");
      trained.step();
      check("step()");
    }
    save_checkpoint(folder / "saved", trained, trained.optimizer());
    check("save_checkpoint()");
    load_checkpoint(folder / "saved", trained, trained.optimizer());
    check("load_checkpoint()");
    std::vector<at::Tensor> own_result;
    for (const auto& entry : trained.full_state_dict()) own_result.push_back(entry.value().cpu());
    check("full_state_dict()");
    if (rank == 0) result = std::move(own_result);
  });
  EXPECT_EQ(errors, no_errors(kWorld));
  return result;
}

TEST(AcceleratorGuest, UsesTheCallersDeviceAndStreamAndLeavesThemCurrent) {
  accelerator::needs_devices(kWorld);
  for (const Wrapper wrapper : {Wrapper::kDdp, Wrapper::kOssSdp, Wrapper::kFsdp}) {
    SCOPED_TRACE(static_cast<int>(wrapper));
    const Simulation simulation;
    set_nccl_backends(accelerator::device_groups());
    const auto expected = train(wrapper, Caller::kOnDefaultStream);
    ASSERT_EQ(expected.size(), 6u);
    for (const Caller caller : {Caller::kOnOwnStream, Caller::kOnOtherDevice}) {
      SCOPED_TRACE(static_cast<int>(caller));
      const auto got = train(wrapper, caller);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
      // With another current device, the simulation mistakes the host for another rank's, so findings are not valid.
      if (caller == Caller::kOnOwnStream) {
        EXPECT_EQ(Simulation::findings(), std::vector<std::string>());
      }
    }
    for (int device = 0; device < kWorld; ++device)
      for (const auto& [place, times] : Simulation::counts(device).wait_places)
        EXPECT_EQ(place.find("synchronize the device"), std::string::npos) << place << ": " << times;
  }
}

TEST(AcceleratorGuest, GroupsThatAllRanksHaveLeftKeepNoKeys) {
  accelerator::needs_devices(kWorld);
  const Simulation simulation;
  set_nccl_backends(accelerator::device_groups());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](int count) {
    EXPECT_EQ(on_threads(kWorld,
                         [&](int rank) {
                           for (int i = 0; i < count; ++i)
                             communicator_from(store, rank, kWorld,
                                               {.device = device_of(rank), .timeout = std::chrono::seconds(60)})
                                 ->barrier();
                         }),
              no_errors(kWorld));
  };
  make(10);
  const int64_t keys = store->getNumKeys();
  make(30);
  EXPECT_LE(store->getNumKeys(), keys + 30);
}

// As with init(), ranks of a host use different devices, not all the current device of a new thread.
TEST(AcceleratorGuest, ElasticRanksUseTheDeviceOfTheirLocalRank) {
  const Simulation simulation;
  const c10::DeviceGuard on_device(device_of(1));
  for (const GroupOptions& group : {GroupOptions{.device = at::kCUDA}, GroupOptions{.backend = "nccl"}}) {
    Elastic elastic({.group = group});  // without a launcher the local rank is 0
    elastic.run([](ElasticRun& run) { EXPECT_EQ(run.comm()->device(), device_of(0)); });
  }
}

}  // namespace
}  // namespace tessera::accelerator_guest_test
