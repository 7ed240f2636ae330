#include "tests/support/accelerator/ranks.h"

#include <ATen/Parallel.h>

#include <utility>

#include "tests/support/accelerator/backend.h"
#include "tests/support/accelerator/gpus.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

class SimulatedGroups : public NcclBackends {
 public:
  c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         at::Device device, std::chrono::milliseconds) override {
    return c10::make_intrusive<Backend>(store, rank, size, device);
  }
  c10::intrusive_ptr<c10d::Backend> split(c10d::Backend& parent, const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks, std::chrono::milliseconds) override {
    return parent.split(store, ranks, nullptr);
  }
  c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work) override {
    return accelerator::without_tensors(work);
  }
};

}  // namespace

std::shared_ptr<NcclBackends> device_groups() {
  return on_gpus() ? gpus()->groups : std::make_shared<SimulatedGroups>();
}

void on_devices(int world, const std::function<void(std::shared_ptr<Communicator>)>& body, InitOptions options) {
  needs_devices(world);
  set_nccl_backends(device_groups());
  options.device = at::kCUDA;
  options.process.cache_memory = false;
  run_ranks(
      world,
      [&](std::shared_ptr<Communicator> comm) {
        at::set_num_threads(1);
        body(std::move(comm));
      },
      options);
}

void on_devices(int world, const std::function<void(std::shared_ptr<Communicator>)>& body,
                std::chrono::milliseconds timeout) {
  InitOptions options;
  options.timeout = timeout;
  on_devices(world, body, options);
}

at::Device share_device() {
  groups_span_processes = true;
  set_nccl_backends(device_groups());
  return {at::kCUDA, 0};
}

std::shared_ptr<Communicator> init_on_shared_device(InitOptions options) {
  options.device = share_device();
  options.process.cache_memory = false;
  return init(options);
}

void delay_next_stream(int64_t cycles) {
  if (on_gpus()) gpus()->delay_next_stream(cycles);
}

}  // namespace tessera::accelerator
