// Ranks as threads, each with a device of the accelerator, joined by the NCCL communicator.
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

// run_ranks() on devices, with such groups: rank r is a thread with device r. Skips the test if there are fewer GPUs.
void on_devices(int world, const std::function<void(std::shared_ptr<Communicator>)>& body,
                InitOptions options = {.timeout = std::chrono::seconds(60)});
void on_devices(int world, const std::function<void(std::shared_ptr<Communicator>)>& body,
                std::chrono::milliseconds timeout);

// Prepares this process, a rank, for groups of processes that may share a device. Returns that device, number 0. A
// Simulation must be running.
at::Device share_device();
// init() of a rank that is a process, with device 0, which ranks on one host may share. Calls share_device().
std::shared_ptr<Communicator> init_on_shared_device(InitOptions options);

// On GPUs: keeps one of the pool's streams, in turn, busy for so many cycles. The library, NCCL and the tests take
// their streams from this pool. A no-op in the simulation, whose streams have delays of their own.
void delay_next_stream(int64_t cycles);

}  // namespace tessera::accelerator
