#include "tessera/memory/memory_cache.h"

#include <ATen/ceil_div.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>
#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include "tessera/memory/switches.h"

namespace tessera {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void* map_pages(size_t bytes) {
  const size_t alignment = bytes < kHugePageBytes ? page_bytes() : kHugePageBytes;
  const size_t reserved_bytes = bytes + alignment - page_bytes();
  void* const reserved = ::mmap(nullptr, reserved_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(reserved);
  const size_t before_bytes = at::round_up<uintptr_t>(address, alignment) - address;
  const size_t after_bytes = reserved_bytes - before_bytes - bytes;
  if (before_bytes > 0) ::munmap(begin, before_bytes);
  if (after_bytes > 0) ::munmap(begin + before_bytes + bytes, after_bytes);
#ifdef MADV_HUGEPAGE
  if (alignment == kHugePageBytes) ::madvise(begin + before_bytes, bytes, MADV_HUGEPAGE);
#endif
  return begin + before_bytes;
}

}  // namespace

MemoryCache::~MemoryCache() { release(); }

void MemoryCache::unmap(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) ::munmap(block.memory, block.bytes);
}

void* MemoryCache::take(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  bytes = at::round_up(std::max<size_t>(bytes, 1), page_bytes());
  std::vector<Block> unused;
  {
    std::lock_guard lock(mutex_);
    if (void* const block = reuse(bytes)) return block;
    if (live_.size() >= kMostBlocks) return nullptr;
    live_bytes_ += bytes;
    peak_live_bytes_ = std::max(peak_live_bytes_, live_bytes_);
    const size_t most_bytes = peak_live_bytes_ + peak_live_bytes_ / 8;
    while (!idle_.empty() && (live_bytes_ + idle_bytes_ > most_bytes || live_.size() + idle_.size() >= kMostBlocks))
      unused.push_back(take_idle(std::prev(idle_.end())));
  }
  unmap(unused);
  void* block = map_pages(bytes);
  if (block == nullptr) {  // perhaps for what is idle here
    release();
    block = map_pages(bytes);
  }
  std::lock_guard lock(mutex_);
  if (block == nullptr) {
    live_bytes_ -= bytes;
    peak_live_bytes_ = live_bytes_;  // as release() does
    return nullptr;
  }
  live_.emplace(block, bytes);
  ++mapped_;
  return block;
}

void* MemoryCache::reuse(size_t bytes) {
  const auto fit = idle_by_bytes_.lower_bound({bytes, INT64_MIN});
  if (fit == idle_by_bytes_.end() || fit->first > bytes + bytes / 8) return nullptr;
  const Block block = take_idle(idle_.find(fit->second));
  live_bytes_ += block.bytes;
  peak_live_bytes_ = std::max(peak_live_bytes_, live_bytes_);
  live_.emplace(block.memory, block.bytes);
  ++reused_;
  return block.memory;
}

MemoryCache::Block MemoryCache::take_idle(std::map<Stamp, Block>::iterator idle) {
  const auto [stamp, block] = *idle;
  idle_bytes_ -= block.bytes;
  idle_by_bytes_.erase({block.bytes, stamp});
  idle_.erase(idle);
  return block;
}

bool MemoryCache::give(void* block) {
  std::lock_guard lock(mutex_);
  const auto live = live_.find(block);
  if (live == live_.end()) return false;
  const size_t bytes = live->second;
  live_.erase(live);
  live_bytes_ -= bytes;
  idle_bytes_ += bytes;
  const Stamp stamp = --last_stamp_;
  idle_.emplace(stamp, Block{block, bytes});
  idle_by_bytes_.emplace(bytes, stamp);
  return true;
}

void MemoryCache::release() {
  std::vector<Block> unused;
  {
    std::lock_guard lock(mutex_);
    while (!idle_.empty()) unused.push_back(take_idle(idle_.begin()));
    peak_live_bytes_ = live_bytes_;
  }
  unmap(unused);
}

MemoryCache::Stats MemoryCache::stats() const {
  std::lock_guard lock(mutex_);
  return {static_cast<int64_t>(live_bytes_), static_cast<int64_t>(idle_bytes_), static_cast<int64_t>(peak_live_bytes_),
          mapped_, reused_};
}

// ---- the process's -----------------------------------------------------------------------------

namespace {

std::atomic<bool> is_on{false};

// Never destroyed: tensors outlive everything.
MemoryCache& process_cache() {
  static auto* const cache = new MemoryCache;
  return *cache;
}

void free_memory(void* memory) {
  // malloc's blocks start behind its own notes, so few of them are at the start of a page.
  const bool may_be_block = reinterpret_cast<uintptr_t>(memory) % page_bytes() == 0;
  if (!may_be_block || !process_cache().give(memory)) return c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
  c10::profiledCPUMemoryReporter().Delete(memory);
}

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes >= MemoryCache::kSmallestBytes && is_on.load(std::memory_order_relaxed))
      memory = process_cache().take(bytes);
    if (memory != nullptr) {
      c10::profiledCPUMemoryReporter().New(memory, bytes);
    } else {
      memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);  // throws where there is none
    }
    return {memory, memory, &free_memory, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

bool is_wanted() {
#ifdef __SANITIZE_ADDRESS__
  return false;
#else
  return !is_switched_off("TESSERA_MEMORY_CACHE");
#endif
}

}  // namespace

c10::Allocator* memory_cache_allocator() {
  static auto* const allocator = new CachingAllocator;
  return allocator;
}

void cache_memory() {
  if (!is_wanted()) return;
  is_on = true;
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(memory_cache_allocator());
}

MemoryCache::Stats memory_cache_stats() { return process_cache().stats(); }

void release_freed_memory() {
  process_cache().release();
#ifdef __GLIBC__
  // glibc keeps freed blocks below 32 MiB for itself once it has seen them come and go.
  // One thread at a time: where another allocator serves malloc, glibc's has yet to set itself up, unlocked.
  static std::mutex trimming;
  std::lock_guard lock(trimming);
  ::malloc_trim(0);
#endif
}

}  // namespace tessera
