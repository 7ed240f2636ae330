#include <tessera/peak_memory.h>

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/memory/memory_cache.h"
#include "core/runtime/stream_uses.h"

namespace tessera {
using namespace internal;

namespace {

// Guards all accounts and the ledger. One mutex for all can be locked around fork(); otherwise a child could inherit a
// mutex that a thread of the parent has locked.
std::mutex accounts_mutex;

}  // namespace

// The live bytes that one thread has allocated. Changed by that thread and by threads that free its memory.
struct PeakMemory::Account {
  int64_t current_bytes = 0;
  std::vector<int64_t*> peaks;  // peaks of the existing PeakMemory objects

  void add(int64_t bytes) {
    current_bytes += bytes;
    for (int64_t* peak : peaks) *peak = std::max(*peak, current_bytes);
  }
};

namespace {

thread_local std::shared_ptr<PeakMemory::Account> account_of_thread;

// The allocations of counted threads. Keyed by address, because oneDNN frees by raw_deleter(), which gets nothing else.
class Ledger {
 public:
  void enter(void* memory, int64_t bytes, std::shared_ptr<PeakMemory::Account> account) {
    std::lock_guard lock(accounts_mutex);
    account->add(bytes);
    entries_[memory] = {bytes, std::move(account)};
  }
  void strike(void* memory) {
    std::unique_lock lock(accounts_mutex);
    const auto found = entries_.extract(memory);  // the node is destroyed without the lock
    if (!found.empty()) found.mapped().account->add(-found.mapped().bytes);
    lock.unlock();
  }

 private:
  struct Entry {
    int64_t bytes = 0;
    std::shared_ptr<PeakMemory::Account> account;
  };
  std::unordered_map<void*, Entry> entries_;
};

// Never destroyed: tensors may outlive static objects.
Ledger& ledger() {
  static auto* const ledger = new Ledger;
  return *ledger;
}
// The allocator whose memory is counted. Atomic: other threads may allocate while the first PeakMemory sets it.
std::atomic<c10::Allocator*> counted_allocator = nullptr;

void free_counted(void* memory) {
  ledger().strike(memory);  // first, because another thread may reuse the address after the free
  counted_allocator.load()->raw_deleter()(memory);
}

class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = counted_allocator.load()->raw_allocate(bytes);
    if (account_of_thread && bytes > 0) ledger().enter(memory, static_cast<int64_t>(bytes), account_of_thread);
    return {memory, memory, &free_counted, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    counted_allocator.load()->copy_data(to, from, bytes);
  }
};

void install_counting_allocator() {
  static std::once_flag is_installed;
  std::call_once(is_installed, [] {
    constexpr uint8_t kAnyPriority = 255;
    ::pthread_atfork([] { accounts_mutex.lock(); }, [] { accounts_mutex.unlock(); }, [] { accounts_mutex.unlock(); });
    counted_allocator = c10::GetCPUAllocator();
    const bool is_libtorchs_own = counted_allocator == c10::GetDefaultCPUAllocator();
    if (is_libtorchs_own) counted_allocator = memory_cache_allocator();  // init() may install the cache later
    c10::SetCPUAllocator(new CountingAllocator, kAnyPriority);           // never freed: libtorch keeps a raw pointer
  });
}

c10::CachingDeviceAllocator::DeviceStats stats_of(c10::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

PeakMemory::PeakMemory(c10::Device device) : device_(with_index(device)) {
  if (device_.is_cpu()) {
    install_counting_allocator();
    if (!account_of_thread) account_of_thread = std::make_shared<Account>();
    account_ = account_of_thread;
    std::lock_guard lock(accounts_mutex);
    account_->peaks.push_back(&peak_bytes_);
    peak_bytes_ = account_->current_bytes;
    return;
  }
  try {
    at::globalContext().lazyInitDevice(device_.type());  // CUDA's allocator has no statistics before this
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  } catch (const std::exception& error) {
    throw std::invalid_argument("PeakMemory on " + device_.str() + ": its allocator does not count: " + error.what());
  }
}

PeakMemory::~PeakMemory() {
  if (!account_) return;
  std::lock_guard lock(accounts_mutex);
  std::erase(account_->peaks, &peak_bytes_);
}

int64_t PeakMemory::current_bytes() const {
  if (!account_) return stats_of(device_).allocated_bytes[kAggregate].current;
  std::lock_guard lock(accounts_mutex);
  return account_->current_bytes;
}

int64_t PeakMemory::peak_bytes() const {
  if (!account_) return stats_of(device_).allocated_bytes[kAggregate].peak;
  std::lock_guard lock(accounts_mutex);
  return peak_bytes_;
}

void PeakMemory::reset() {
  if (!account_) return c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  std::lock_guard lock(accounts_mutex);
  peak_bytes_ = account_->current_bytes;
}

}  // namespace tessera
