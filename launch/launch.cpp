#include "tessera/launch/launch.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <stdexcept>

#include "tessera/comm/backends.h"
#include "tessera/launch/launch_environment.h"
#include "tessera/launch/local_address.h"
#include "tessera/launch/rendezvous.h"
#include "tessera/memory/memory_cache.h"
#include "tessera/trace/trace.h"

namespace tessera {
namespace {

LaunchEnvironment read_launch_environment() {
  return parse_launch_environment([](const char* name) { return std::getenv(name); });
}

// Backend and device that the options mean: where one is not given, the other decides.
struct Choice {
  bool nccl;
  at::Device device;
};

at::Device local_cuda_device(const LaunchEnvironment& environment) {
  if (environment.local_rank < 0) {
    throw std::invalid_argument("tessera::init: the launcher (" + environment.launcher +
                                ") does not say which rank of its host this is, so no CUDA device can be chosen; "
                                "set LOCAL_RANK, or InitOptions::device with an index");
  }
  return {at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank)};
}

Choice choose(const InitOptions& options, const LaunchEnvironment& environment) {
  if (!options.backend.empty() && options.backend != "gloo" && options.backend != "nccl") {
    throw std::invalid_argument("tessera::init: InitOptions::backend is \"" + options.backend +
                                "\"; expected \"gloo\", \"nccl\", or empty for the device's own");
  }
  if (options.timeout <= std::chrono::milliseconds::zero()) {
    throw std::invalid_argument("tessera::init: InitOptions::timeout is " + std::to_string(options.timeout.count()) +
                                " ms; expected more than 0");
  }
  if (options.device && !options.device->is_cpu() && !options.device->is_cuda()) {
    throw std::invalid_argument("tessera::init: InitOptions::device is " + options.device->str() +
                                "; expected cpu or cuda");
  }
  const bool on_cuda = options.device ? options.device->is_cuda() : options.backend == "nccl";
  const bool nccl = options.backend.empty() ? on_cuda : options.backend == "nccl";
  if (nccl != on_cuda) {
    throw std::invalid_argument("tessera::init: InitOptions::backend is \"" + options.backend +
                                "\" and InitOptions::device is " + options.device->str() +
                                "; expected gloo with cpu or nccl with cuda");
  }
  if (!on_cuda) return {false, at::kCPU};
  const bool has_index = options.device && options.device->has_index();
  return {true, has_index ? *options.device : local_cuda_device(environment)};
}

// The address of this rank if that is not to be found out.
std::string given_address(bool nccl) {
  // NCCL reads a variable of its own, NCCL_SOCKET_IFNAME, and asks nobody for an address.
  if (nccl) return "none";
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface == nullptr || *interface == '\0' ? std::string() : interface_address(interface);
}

}  // namespace

bool launched() { return read_launch_environment().launched(); }

std::shared_ptr<Communicator> init(InitOptions options) {
  const auto environment = read_launch_environment();
  const auto choice = choose(options, environment);
  if (!environment.note.empty()) TORCH_WARN("tessera::init: ", environment.note);

  if (options.cache_memory) cache_memory();
  Trace::set_rank_of_process(environment.rank);
  Rendezvous found{c10::make_intrusive<c10d::HashStore>(), "127.0.0.1"};
  if (environment.world_size > 1) {
    found = rendezvous(environment, given_address(choice.nccl), options.timeout);
  }
  if (choice.nccl) {
    return make_nccl_communicator(found.store, environment.rank, environment.world_size, choice.device,
                                  options.timeout);
  }
  return make_gloo_communicator(found.store, environment.rank, environment.world_size,
                                {found.address, options.timeout, options.peer_memory});
}

}  // namespace tessera
