#include "tessera/memory/peak_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tessera/memory/memory_cache.h"

namespace tessera {

// Written by the thread that allocates and by those that free what it allocated.
struct PeakMemory::Account {
  std::mutex mutex;
  int64_t current_bytes = 0;
  std::vector<int64_t*> peaks;  // of the PeakMemory objects that are alive

  void add(int64_t bytes) {
    std::lock_guard lock(mutex);
    current_bytes += bytes;
    for (int64_t* peak : peaks) *peak = std::max(*peak, current_bytes);
  }
};

namespace {

thread_local std::shared_ptr<PeakMemory::Account> account_of_thread;

// One allocation of a counted thread: what libtorch's allocator gave, and whose it is.
struct Counted {
  c10::DataPtr data;
  int64_t bytes;
  std::shared_ptr<PeakMemory::Account> account;
};

void free_counted(void* context) {
  std::unique_ptr<Counted> counted(static_cast<Counted*>(context));
  counted->account->add(-counted->bytes);
}

class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* next) : next_(next) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = next_->allocate(bytes);
    if (!account_of_thread || bytes == 0) return data;
    void* const pointer = data.get();
    const auto device = data.device();
    auto counted = std::make_unique<Counted>(Counted{std::move(data), static_cast<int64_t>(bytes), account_of_thread});
    account_of_thread->add(counted->bytes);
    return {pointer, counted.release(), &free_counted, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { next_->copy_data(to, from, bytes); }

 private:
  c10::Allocator* const next_;
};

// libtorch keeps a plain pointer to its allocator, and tensors outlive everything.
void install_counting_allocator() {
  static auto* const counting = [] {
    constexpr uint8_t kAnyPriority = 255;
    c10::Allocator* next = c10::GetCPUAllocator();
    if (next == c10::GetDefaultCPUAllocator()) next = memory_cache_allocator();  // init() may come later
    auto* allocator = new CountingAllocator(next);
    c10::SetCPUAllocator(allocator, kAnyPriority);
    return allocator;
  }();
  (void)counting;
}

c10::CachingDeviceAllocator::DeviceStats stats_of(c10::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

PeakMemory::PeakMemory(c10::Device device) : device_(device) {
  if (device_.is_cpu()) {
    install_counting_allocator();
    if (!account_of_thread) account_of_thread = std::make_shared<Account>();
    account_ = account_of_thread;
    std::lock_guard lock(account_->mutex);
    account_->peaks.push_back(&peak_bytes_);
    peak_bytes_ = account_->current_bytes;
    return;
  }
  try {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  } catch (const std::exception& error) {
    throw std::invalid_argument("PeakMemory on " + device_.str() + ": its allocator does not count: " + error.what());
  }
}

PeakMemory::~PeakMemory() {
  if (!account_) return;
  std::lock_guard lock(account_->mutex);
  std::erase(account_->peaks, &peak_bytes_);
}

int64_t PeakMemory::current_bytes() const {
  if (!account_) return stats_of(device_).allocated_bytes[kAggregate].current;
  std::lock_guard lock(account_->mutex);
  return account_->current_bytes;
}

int64_t PeakMemory::peak_bytes() const {
  if (!account_) return stats_of(device_).allocated_bytes[kAggregate].peak;
  std::lock_guard lock(account_->mutex);
  return peak_bytes_;
}

void PeakMemory::reset() {
  if (!account_) return c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  std::lock_guard lock(account_->mutex);
  peak_bytes_ = account_->current_bytes;
}

}  // namespace tessera
