// Device memory, allocated like CUDACachingAllocator, and page-locked host memory.
//
// All memory is mapped twice, for kernels and for the host. The host's mapping is protected while the host must not
// touch the memory: always for device memory, and for page-locked memory while a device may use it.
#include "tests/support/accelerator/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/accelerator/gpus.h"
#include "tests/support/accelerator/graphs.h"
#include "tests/support/accelerator/races.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

constexpr size_t kArenaBytes = size_t{2} << 30;  // size of the address range; memory is committed on use

// A bump allocator over memory that is mapped twice. Can free only all memory at once.
class Arena {
 public:
  std::pair<std::byte*, std::byte*> take(size_t bytes, int host_protection) {
    if (host_ == nullptr) map(host_protection);
    TORCH_CHECK_WITH(OutOfMemoryError, top_ + bytes <= kArenaBytes, "simulated accelerator: out of memory");
    const size_t at = std::exchange(top_, top_ + bytes);
    return {host_ + at, kernels_ + at};
  }
  void reset() {
    if (host_ == nullptr) return;
    Races::get().remove_blocks(host_, kArenaBytes);
    TORCH_CHECK(::madvise(kernels_, kArenaBytes, MADV_REMOVE) == 0, "simulated accelerator: madvise");
    top_ = 0;
  }
  bool contains(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    return host_ != nullptr && byte >= host_ && byte < host_ + kArenaBytes;
  }

 private:
  void map(int host_protection) {
    const int file = ::memfd_create("simulated accelerator", 0);
    TORCH_CHECK(file >= 0 && ::ftruncate(file, kArenaBytes) == 0, "simulated accelerator: no memory");
    auto view = [&](int protection) {
      void* address = ::mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(address != MAP_FAILED, "simulated accelerator: no memory");
      return static_cast<std::byte*>(address);
    };
    host_ = view(host_protection);
    kernels_ = view(PROT_READ | PROT_WRITE);
    ::close(file);
  }

  std::byte *host_ = nullptr, *kernels_ = nullptr;
  size_t top_ = 0;
};

std::mutex mutex;  // guards all variables below
Arena device_arenas[kDevices];
Arena pinned_arena;
struct DeviceMemory {
  int64_t allocated_bytes = 0, peak_bytes = 0;  // bytes of tensors, and of freed blocks with uses in flight
  int64_t reserved_bytes = 0;                   // bytes taken from the arena
};
DeviceMemory device_memory[kDevices];
// Free device blocks, by stream, bytes, registered group and recording.
std::map<std::tuple<int, size_t, int64_t, int64_t>, std::vector<void*>> idle;
thread_local int64_t group_of_thread = 0;  // group with which this thread's allocations are registered; 0: none
std::map<size_t, std::vector<void*>> idle_pinned;
int64_t bytes_page_locked = 0;
struct Leaving {
  void* begin;
  std::vector<Point> uses;  // uses by streams that recordStream() has named
};
std::vector<Leaving> leaving;
std::map<const void*, std::vector<Point>> pinned_uses;

// Frees a block. A later use by a stream other than the block's is reported as a race with this write.
void give_back(void* begin, const Clock* also) {
  const auto info = Races::get().block_at(begin).value();
  const auto address = reinterpret_cast<uintptr_t>(begin);
  // After a recording, the graph keeps its memory, because replays write to it.
  const bool is_reused =
      info.recording == 0 || (also == nullptr && is_recording(device_of(info.stream), info.recording));
  if (is_reused)
    launch(
        info.stream, kGivenBack, {{address, address + info.bytes, true}},
        [info] { std::memset(info.alias, 0xff, info.bytes); }, also);
  std::lock_guard lock(mutex);
  device_memory[device_of(info.stream)].allocated_bytes -= static_cast<int64_t>(info.bytes);
  if (is_reused) idle[{info.stream, info.bytes, info.registered_with, info.recording}].push_back(begin);
}

void give_back_what_is_free() {
  std::vector<Leaving> over;
  {
    std::lock_guard lock(mutex);
    std::erase_if(leaving, [&](Leaving& block) {
      const bool is_used = !std::ranges::all_of(block.uses, [](const Point& use) { return use.reached->is_past(); });
      // As in CUDA's allocator, no such block is reused during a recording, which the device's own threads begin.
      const int stream = Races::get().block_at(block.begin)->stream;
      if (is_used || device_of(stream) != current_device() || recording_of(stream) != 0) return false;
      over.push_back(std::move(block));
      return true;
    });
  }
  for (const Leaving& block : over) {
    Clock all{};
    for (const Point& use : block.uses)
      for (int i = 0; i < kStreams; ++i) all[i] = std::max(all[i], use.clock[i]);
    give_back(block.begin, &all);
  }
}

void free_device(void* begin) {
  if (begin == nullptr) return;
  give_back_what_is_free();
  const auto info = Races::get().block_at(begin).value();
  const int device = device_of(info.stream);
  if (info.recording == 0 && postpone(device, [begin] { free_device(begin); })) return;
  const auto recorded = Races::get().take_recorded(begin);
  if (recorded.empty()) return give_back(begin, nullptr);
  if (info.recording != 0) {  // uses by other streams are in the recording, which only replays run
    const Clock never{};
    return give_back(begin, &never);
  }
  Leaving block{begin, {}};
  for (const int stream : recorded) block.uses.push_back(record(stream));
  std::lock_guard lock(mutex);
  leaving.push_back(std::move(block));
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device here(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &free_device, here};
    give_back_what_is_free();
    const size_t rounded = (bytes + 511) / 512 * 512;
    const int stream = current_stream(device);
    const int64_t recording = recording_of(stream);
    std::lock_guard lock(mutex);
    DeviceMemory& memory = device_memory[device];
    memory.allocated_bytes += static_cast<int64_t>(rounded);
    memory.peak_bytes = std::max(memory.peak_bytes, memory.allocated_bytes);
    auto& same = idle[{stream, rounded, group_of_thread, recording}];
    if (!same.empty()) {
      void* begin = same.back();
      same.pop_back();
      return {begin, begin, &free_device, here};
    }
    const auto [host, kernels] = device_arenas[device].take(rounded, PROT_NONE);
    memory.reserved_bytes += static_cast<int64_t>(rounded);
    std::memset(kernels, 0xff, rounded);
    Races::get().add_block(host, {rounded, stream, false, kernels, group_of_thread, recording});
    return {host, host, &free_device, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(kernel_address(to), kernel_address(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex);
    for (auto& [key, blocks] : idle) {
      const auto& [stream, bytes, registered, recording] = key;
      if (recording != 0) continue;
      device_memory[device_of(stream)].reserved_bytes -= static_cast<int64_t>(bytes * blocks.size());
      blocks.clear();
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    // Recognizes this allocator's memory by the deleter, like CUDACachingAllocator.
    if (pointer.get_deleter() != &free_device || is_left_out(Request::kRecordStream)) return;
    Races::get().record_stream(pointer.get(), stream_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    std::lock_guard lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const DeviceMemory& memory = device_memory[checked(device)];
    stats.allocated_bytes[kAll].current = memory.allocated_bytes;
    stats.allocated_bytes[kAll].peak = memory.peak_bytes;
    stats.reserved_bytes[kAll].current = memory.reserved_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    DeviceMemory& memory = device_memory[checked(device)];
    memory.peak_bytes = memory.allocated_bytes;
  }

 private:
  static c10::DeviceIndex checked(c10::DeviceIndex device) {
    TORCH_CHECK(device >= 0 && device < kDevices, "Invalid device argument ", device, ": did you call init?");
    return device;
  }
};

std::vector<Point> uses_of(void* pinned) {
  std::lock_guard lock(mutex);
  auto of = pinned_uses.extract(pinned);
  return of.empty() ? std::vector<Point>() : std::move(of.mapped());
}

void give_back_pinned(void* begin) {
  const auto info = Races::get().block_at(begin).value();
  Races::get().forget(begin);
  std::lock_guard lock(mutex);
  bytes_page_locked -= static_cast<int64_t>(info.bytes);
  idle_pinned[info.bytes].push_back(begin);
}

void* take_pinned(size_t bytes) {
  std::lock_guard lock(mutex);
  bytes_page_locked += static_cast<int64_t>(bytes);
  auto& same = idle_pinned[bytes];
  if (!same.empty()) {
    void* begin = same.back();
    same.pop_back();
    return begin;
  }
  const auto [host, kernels] = pinned_arena.take(bytes, PROT_READ | PROT_WRITE);
  Races::get().add_block(host, {bytes, 0, true, kernels});
  return host;
}

// Rounds up to whole pages, the unit of memory protection.
size_t in_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Frees page-locked memory. Blocks until devices have completed the uses that record_event() recorded.
void free_pinned(void* begin) {
  if (begin == nullptr) return;
  for (const Point& use : uses_of(begin)) use.reached->wait();
  give_back_pinned(begin);
}

// Page-locked memory of the driver, which is freed without waiting for uses.
class PageLocked final : public PageLockedAllocator {
 public:
  void* allocate(size_t bytes) override { return take_pinned(in_pages(bytes)); }
  void free(void* begin) noexcept override {
    for (const Point& use : uses_of(begin)) {
      if (!use.reached->is_past()) Races::get().found("page-locked memory was freed before a copy of it had ended");
      use.reached->wait();
    }
    give_back_pinned(begin);
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    void* const begin = take_pinned(std::bit_ceil(in_pages(bytes)));  // rounds up like libtorch's allocator
    return {begin, begin, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    const auto info = Races::get().block_at(pointer);
    if (!info) return false;
    const Point use = record(stream_of(stream.device_index(), stream.id()));
    std::lock_guard lock(mutex);
    pinned_uses[pointer].push_back(use);
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct sigaction before;

void explain_fault(int signal, siginfo_t* info, void* context) {
  if (Races::get().host_touched(info->si_addr)) return;
  for (int device = 0; device < kDevices; ++device) {
    if (!device_arenas[device].contains(info->si_addr)) continue;
    std::fprintf(stderr, "simulated accelerator: the host touches memory of device %d [%s]\n", device,
                 CallStack::here().text().c_str());
    std::abort();
  }
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr)
    return before.sa_sigaction(signal, info, context);
  std::signal(signal, SIG_DFL);  // the instruction faults again, which ends the process
}

}  // namespace

void reclaim() {
  give_back_what_is_free();
  for (int stream = 0; stream < kStreams; ++stream) wait_in_secret(stream);
  std::lock_guard lock(mutex);
  for (int device = 0; device < kDevices; ++device) {
    if (device_memory[device].allocated_bytes > 0) continue;
    std::erase_if(idle, [&](const auto& blocks) { return device_of(std::get<0>(blocks.first)) == device; });
    device_arenas[device].reset();
    device_memory[device] = {};
  }
  if (bytes_page_locked > 0) return;
  idle_pinned.clear();
  pinned_arena.reset();
}

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

at::HostAllocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

PageLockedAllocator* page_locked_memory() {
  static auto* allocator = new PageLocked;
  return allocator;
}

int64_t page_locked_bytes() {
  if (on_gpus()) return page_locked_bytes_of_gpus();
  std::lock_guard lock(mutex);
  return bytes_page_locked;
}

int64_t reserved_bytes(int device) {
  std::lock_guard lock(mutex);
  return device_memory[device].reserved_bytes;
}

RegisteredScope::RegisteredScope(int64_t group) : before_(std::exchange(group_of_thread, group)) {}
RegisteredScope::~RegisteredScope() { group_of_thread = before_; }
bool is_registered_with(const void* address, int64_t group) {
  const auto info = Races::get().block_at(address);
  return info && info->registered_with == group;
}

void* kernel_address(const void* address) {
  const auto info = Races::get().block_at(address);
  return info ? info->alias : const_cast<void*>(address);
}

bool is_pinned(const void* address) { return pinned_arena.contains(address); }

void watch_for_faults() {
  struct sigaction action = {};
  action.sa_sigaction = &explain_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, &before);
}

}  // namespace tessera::accelerator
