// The device interface for libtorch (guard, streams, events, hooks), and the simulation's interface for tests.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>

#include "core/runtime/graph_recorder.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/backend.h"
#include "tests/support/accelerator/gpus.h"
#include "tests/support/accelerator/graphs.h"
#include "tests/support/accelerator/memory.h"
#include "tests/support/accelerator/races.h"
#include "tests/support/accelerator/streams.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device device_at(int index) { return {c10::kCUDA, static_cast<DeviceIndex>(index)}; }
Stream stream_at(int stream) {
  return Stream(Stream::UNSAFE, device_at(device_of(stream)), stream % kStreamsPerDevice);
}
int number_of(const Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

// The device guard. Represents an event by a Point on the heap.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device device) const override { return device_at(exchange_device(device.index())); }
  Device getDevice() const override { return device_at(current_device()); }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange_device(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override { return stream_at(current_stream(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return stream_at(stream_of(index_of(device), 0)); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream_at(next_of_pool(index_of(device)));
  }
  Stream getNewStream(Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  Stream exchangeStream(Stream stream) const override { return stream_at(exchange_stream(number_of(stream))); }
  bool queryStream(const Stream& stream) const override {
    return query(accelerator::record(number_of(stream)), stream.device_index());
  }
  void synchronizeStream(const Stream& stream) const override {
    if (!is_left_out(Request::kSynchronize)) synchronize(number_of(stream), "synchronize a stream");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    for (int id = 0; id < kStreamsPerDevice; ++id) synchronize(stream_of(device, id), "synchronize the device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(pointer, stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    note_event(stream.device_index());
    if (*event == nullptr) {
      auto* point = new Point;
      point->reached->come();
      *event = point;
    }
    if (!is_left_out(Request::kRecord)) *static_cast<Point*>(*event) = accelerator::record(number_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    note_event(stream.device_index());
    if (event != nullptr && !is_left_out(Request::kBlock))
      accelerator::block(number_of(stream), *static_cast<Point*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Point*>(event), current_device());
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr && !is_left_out(Request::kSynchronize))
      synchronize(*static_cast<Point*>(event), current_device(), "synchronize an event");
  }
  void destroyEvent(void* event, DeviceIndex device) const noexcept override {
    if (event != nullptr) note_event(device);
    delete static_cast<Point*>(event);
  }

 private:
  static void note_event(DeviceIndex device) {
    if (device != current_device()) Races::get().count_event_elsewhere(device);
  }
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }
};

// libtorch finds this class by its name in a registry.
class CUDAHooks final : public at::CUDAHooksInterface {
 public:
  explicit CUDAHooks(at::CUDAHooksArgs) {
    for (auto& generator : generators_) generator = at::detail::createCPUGenerator();
  }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(accelerator::current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generators_.at(device < 0 ? accelerator::current_device() : device);
  }
  Device getDeviceFromPtr(void* pointer) const override {
    const auto block = Races::get().block_at(pointer);
    TORCH_CHECK(block && !block->is_pinned, "simulated accelerator: not a pointer to device memory");
    return device_at(device_of(block->stream));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

 private:
  std::array<at::Generator, kDevices> generators_;
};

Settings chosen;
std::atomic<bool> has_faults = false, running = false;

}  // namespace

// Registers as libtorch's macros do, unless real GPUs are used, whose classes are then registered.
static const bool is_registered = [] {
  if (on_gpus()) return false;
  static const c10::impl::DeviceGuardImplRegistrar guard(c10::kCUDA, new Guard);
  at::CUDAHooksRegistry()->Register("CUDAHooks",
                                    [](at::CUDAHooksArgs arguments) { return std::make_unique<CUDAHooks>(arguments); });
  return true;
}();

const Settings& settings() { return chosen; }

bool is_left_out(Request request) { return has_faults && chosen.leave_out(request, CallStack::here().text()); }

static void wait_for_all() {
  for (int stream = 0; stream < kStreams; ++stream) wait_in_secret(stream);
}

static void begin_on_gpus(const Settings& settings) {
  needs_devices(1);
  if (settings.leave_out || settings.fails || settings.collectives_in_order || settings.groups_end_together)
    needs_simulation("its groups and streams behave as the test says");
  prepare_gpus();
  set_graph_recorder_factory(gpus()->graph_recorder);
  synchronize_gpus();
  reset_host_waits_of_gpus();
}

Simulation::Simulation(Settings settings) {
  if (on_gpus()) {
    begin_on_gpus(settings);
    running = true;
    chosen = std::move(settings);
    return;
  }
  static const bool installed = [] {
    c10::SetAllocator(c10::kCUDA, device_allocator());
    at::setHostAllocator(c10::kCUDA, pinned_allocator());
    set_page_locked_allocator(page_locked_memory());
    set_graph_recorder_factory(&make_simulated_recorder);
    watch_for_faults();
    return true;
  }();
  TORCH_CHECK(installed);
  wait_for_all();
  has_faults = settings.leave_out != nullptr;
  running = true;
  chosen = std::move(settings);
  Races::get().reset();
}

Simulation::~Simulation() {
  if (on_gpus()) {
    running = false;
    return;
  }
  wait_for_all();
  has_faults = running = false;
  release_collectives_tensors();
  reclaim();
  chosen = {};
  Races::get().reset();
}

bool Simulation::is_running() { return running; }
std::vector<std::string> Simulation::findings() { return Races::get().findings(); }
Counts Simulation::counts(int device) {
  if (!on_gpus()) return Races::get().counts(device);
  Counts counts;
  counts.host_waits = host_waits_of_gpu(device);
  return counts;
}
void Simulation::reset_counts() { on_gpus() ? reset_host_waits_of_gpus() : Races::get().reset_counts(); }

std::vector<uint64_t> seeds(int count) {
  if (const char* chosen_seed = std::getenv("TESSERA_ACCELERATOR_SEED"))
    return {std::strtoull(chosen_seed, nullptr, 10)};
  std::vector<uint64_t> all;
  for (int seed = 1; seed <= (on_gpus() ? 1 : count); ++seed) all.push_back(seed);
  return all;
}

}  // namespace tessera::accelerator
