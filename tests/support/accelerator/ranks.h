// Runs ranks as threads, each with its own device of the accelerator, in a group of the NCCL communicator.
#pragma once

#include <functional>
#include <memory>

#include <tessera/launch.h>
#include "core/comm/nccl/nccl_communicator.h"
#include "tests/support/accelerator/accelerator.h"

namespace tessera::accelerator {
using namespace internal;

// Returns the factory of an NCCL communicator's groups: NCCL's on GPUs, otherwise simulated.
std::shared_ptr<NcclBackends> device_groups();

// Runs run_ranks() with device_groups(): rank r is a thread with device r. Skips the test if there are too few GPUs.
void on_devices(int world, const std::function<void(std::shared_ptr<Communicator>)>& body,
                InitOptions options = {.timeout = std::chrono::seconds(60)});
void on_devices(int world, const std::function<void(std::shared_ptr<Communicator>)>& body,
                std::chrono::milliseconds timeout);

// Makes new groups of this process consist of processes that share device 0. Returns this device. A Simulation must be
// running.
at::Device share_device();
// Returns init(options) of a rank that is a process, on device 0, which all ranks on a host share (share_device()).
std::shared_ptr<Communicator> init_on_shared_device(InitOptions options);

// On GPUs, keeps the next stream of libtorch's pool busy for `cycles` cycles. The library, NCCL and the tests take
// their streams from this pool. A no-op in the simulation, whose streams have random delays.
void delay_next_stream(int64_t cycles);

}  // namespace tessera::accelerator
