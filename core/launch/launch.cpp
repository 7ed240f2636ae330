#include <tessera/launch.h>

#include <ATen/ops/linspace.h>
#include <c10/util/StringUtil.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <future>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "core/comm/backends.h"
#include "core/comm/descriptors.h"
#include "core/comm/group_process.h"
#include "core/launch/device_choice.h"
#include "core/launch/launch_environment.h"
#include "core/launch/local_address.h"
#include "core/launch/process_setup.h"
#include "core/launch/rendezvous.h"
#include "core/launch/shared_cores.h"
#include "core/memory/memory_cache.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"
#include "core/runtime/warn.h"
#include "core/trace/trace.h"

namespace tessera {
using namespace internal;
namespace {

void require_timeout(const InitOptions& options, const char* who) {
  require(options.timeout > std::chrono::milliseconds::zero() && options.timeout <= kLongestTimeout, who,
          ": InitOptions::timeout is ", options.timeout.count(), " ms; expected more than 0 and at most a year");
}

// The backend and the device. If only one is given, it determines the other.
struct Choice {
  bool nccl;
  at::Device device;
};

Choice choose(const InitOptions& options, const LaunchEnvironment& environment) {
  const std::string& backend = options.backend;
  require(backend.empty() || backend == "gloo" || backend == "nccl", "tessera::init: InitOptions::backend is \"",
          backend, "\"; expected \"gloo\", \"nccl\", or empty for the device's own");
  require_timeout(options, "tessera::init");
  const at::Device device = options.device.value_or(backend == "nccl" ? at::kCUDA : at::kCPU);
  require(device.is_cpu() || device.is_cuda(), "tessera::init: InitOptions::device is ", device,
          "; expected cpu or cuda");
  const bool nccl = backend.empty() ? device.is_cuda() : backend == "nccl";
  require(nccl == device.is_cuda(), "tessera::init: InitOptions::backend is \"", backend,
          "\" and InitOptions::device is ", device, "; expected gloo with cpu or nccl with cuda");
  require(nccl || !options.registered_memory,
          "tessera::init: InitOptions::registered_memory is NCCL's, and this group "
          "would be gloo's");
  if (!nccl) return {false, at::kCPU};
  const int visible_count = visible_cuda_devices();
  if (visible_count > 0) return {true, choose_cuda_device(device, environment, visible_count)};
  // If there is no CUDA device, make_nccl_communicator() reports the error.
  return {true, device.has_index() ? device : at::Device(at::kCUDA, 0)};
}

}  // namespace

bool launched() {
  try {
    return read_launch_environment().launched();
  } catch (const std::invalid_argument&) {  // init() throws the error again, and run_main() prints it
    return true;
  }
}

std::shared_ptr<Communicator> init(InitOptions options) {
  auto environment = read_launch_environment();
  ProcessSetup& process = options.process;
  process.terminate_handler &= environment.world_size > 1;
  // Must precede the use of CUDA: CUDA opens files, which could use the numbers of closed standard descriptors.
  const auto effects = std::make_shared<ProcessEffects>(process);
  const auto [nccl, device] = choose(options, environment);
  if (!environment.note.empty()) warn("tessera::init: " + environment.note);

  const int rank = environment.rank, size = environment.world_size;
  Trace::set_rank_of_process(rank);
  // Counts a pidfd for each rank of the host and, in the store's process, the store's connections to all ranks.
  const bool serves_store = rank == 0 && !environment.agent_serves_store;
  if (size > 1)
    require_descriptors(environment.local_world_size + (serves_store ? size : 0), c10::str("rank ", rank, " of ", size),
                        process.raise_descriptor_limit);
  Rendezvous found{c10::make_intrusive<c10d::HashStore>(), "127.0.0.1", {}};
  // NCCL does not use the address, because it reads NCCL_SOCKET_IFNAME.
  if (size > 1) found = rendezvous(environment, nccl ? "none" : named_address(), options.timeout);
  if (environment.local_world_size == 0 && is_loopback_address(found.address)) environment.local_world_size = size;
  if (process.share_cores) share_cores(environment);
  if (found.traced_run) Trace::active()->join(*found.traced_run);
  if (nccl && visible_cuda_devices() > 0) make_current(device);
  return nccl ? make_nccl_communicator(found.store, rank, size, device,
                                       {.timeout = options.timeout,
                                        .registered_memory = options.registered_memory,
                                        .rank_order_sums = options.rank_order_sums,
                                        .serves_store = serves_store,
                                        .process_setup = effects})
              : make_gloo_communicator(found.store, rank, size,
                                       {.address = found.address,
                                        .timeout = options.timeout,
                                        .peer_memory = options.peer_memory,
                                        .serves_store = serves_store,
                                        .permits_tracing = process.permit_tracing,
                                        .raises_descriptor_limit = process.raise_descriptor_limit,
                                        .process_setup = effects});
}

void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body) {
  run_ranks(world, std::move(body), {});
}

void run_ranks(int world, std::function<void(std::shared_ptr<Communicator>)> body, InitOptions options) {
  require(world >= 1, "run_ranks: world is ", world, ", expected at least 1");
  require(body != nullptr, "run_ranks: the body is empty, expected a function");
  require_timeout(options, "run_ranks");
  const bool nccl = options.backend == "nccl" || (options.device && options.device->is_cuda());
  require(options.backend.empty() || options.backend == (nccl ? "nccl" : "gloo"), "run_ranks: backend '",
          options.backend, "', expected gloo with cpu or nccl with cuda");
  require(
      !options.device || (nccl ? options.device->is_cuda() && !options.device->has_index() : options.device->is_cpu()),
      "run_ranks: device ", options.device.value_or(at::kCPU), ", expected cpu with gloo, or cuda without an index");
  require(nccl || !options.registered_memory,
          "run_ranks: InitOptions::registered_memory is NCCL's, and this group would "
          "be gloo's");
  require(!nccl || visible_cuda_devices() == 0 || world <= visible_cuda_devices(), "run_ranks: ", world,
          " ranks, but this process sees ", visible_cuda_devices(), " CUDA devices: each rank has its own");

  // If threads made a process's first call of libtorch's math at once, one might get other bits. So makes it here.
  static_cast<void>(at::linspace(0, 1, 48).sin());
  ProcessSetup& process = options.process;
  process.terminate_handler = process.permit_tracing = process.share_cores = false;  // only for groups of processes
  const auto effects = std::make_shared<ProcessEffects>(process);
  if (!nccl && (!options.peer_memory || c10::utils::check_env("TESSERA_PEER_MEMORY") == false))
    require_descriptors(world * tcp_descriptors(world), c10::str("the connections of ", world, " ranks in one process"),
                        process.raise_descriptor_limit);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr first_error;
  auto rank_main = [&](int rank) {
    std::shared_ptr<Communicator> comm;
    Trace::set_rank_of_thread(rank);
    set_memory_rank_of_thread(rank);
    try {
      if (nccl) {
        const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
        if (visible_cuda_devices() > 0) make_current(device);
        comm = make_nccl_communicator(store, rank, world, device,
                                      {.timeout = options.timeout,
                                       .registered_memory = options.registered_memory,
                                       .rank_order_sums = options.rank_order_sums,
                                       .process_setup = effects});
      } else {
        comm = make_gloo_communicator(store, rank, world,
                                      {.address = "127.0.0.1",
                                       .timeout = options.timeout,
                                       .peer_memory = options.peer_memory,
                                       .raises_descriptor_limit = process.raise_descriptor_limit,
                                       .process_setup = effects});
      }
      body(comm);
    } catch (...) {
      {
        std::lock_guard lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
      // Ends the current waits of the other ranks with this error.
      if (comm) comm->abort(text_of(std::current_exception()));
    }
  };
  // No rank begins before every rank has a thread. If a thread cannot start, no rank runs.
  std::promise<bool> all_begin;
  const std::shared_future<bool> begins = all_begin.get_future().share();
  std::vector<std::thread> ranks;
  try {
    for (int rank = 0; rank < world; ++rank)
      ranks.emplace_back([&rank_main, rank, begins] {
        if (begins.get()) rank_main(rank);
      });
    all_begin.set_value(true);
  } catch (const std::system_error& error) {
    first_error = std::make_exception_ptr(std::runtime_error(
        c10::str("run_ranks: rank ", ranks.size(), " of ", world, " cannot have a thread: ", error.what())));
    all_begin.set_value(false);
  }
  for (std::thread& rank : ranks) rank.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace tessera
