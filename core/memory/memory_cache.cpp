#include "core/memory/memory_cache.h"

#include <ATen/ceil_div.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/env.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

namespace tessera::internal {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kSharedBytes = 16 * kHugePageBytes;  // a mapping that blocks smaller than a huge page share

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t alignment_of(size_t bytes) { return bytes < kHugePageBytes ? page_bytes() : kHugePageBytes; }

void* map_pages(size_t bytes, int protection = PROT_READ | PROT_WRITE) {
  const size_t alignment = alignment_of(bytes);
  const size_t reserved_bytes = bytes + alignment - page_bytes();
  void* const reserved = ::mmap(nullptr, reserved_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(reserved);
  const size_t before_bytes = at::round_up<uintptr_t>(address, alignment) - address;
  const size_t after_bytes = reserved_bytes - before_bytes - bytes;
  if (before_bytes > 0) ::munmap(begin, before_bytes);
  if (after_bytes > 0) ::munmap(begin + before_bytes + bytes, after_bytes);
  if (alignment == kHugePageBytes) ::madvise(begin + before_bytes, bytes, MADV_HUGEPAGE);
  return begin + before_bytes;
}

// Resizes a mapping and keeps its contents; may move the mapping. If this fails, returns null and changes nothing.
void* resize_pages(void* memory, size_t bytes, size_t new_bytes) {
  auto* const begin = static_cast<std::byte*>(memory);
  if (new_bytes <= bytes) {
    if (new_bytes < bytes) ::munmap(begin + new_bytes, bytes - new_bytes);
    return memory;
  }
  const size_t alignment = alignment_of(new_bytes);
  void* resized = MAP_FAILED;
  if (reinterpret_cast<uintptr_t>(memory) % alignment == 0) resized = ::mremap(memory, bytes, new_bytes, 0);
  if (resized == MAP_FAILED) {
    void* const target = map_pages(new_bytes, PROT_NONE);
    if (target == nullptr) return nullptr;
    resized = ::mremap(memory, bytes, new_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    if (resized == MAP_FAILED) {
      ::munmap(target, new_bytes);
      return nullptr;
    }
  }
  if (alignment == kHugePageBytes) ::madvise(resized, new_bytes, MADV_HUGEPAGE);
  return resized;
}

thread_local int rank_of_thread = MemoryCache::kNoRank;

}  // namespace

MemoryCache::~MemoryCache() {
  stop_watch();
  release();
}

void MemoryCache::set_keeps_freed(bool keeps) {
  {
    std::lock_guard lock(mutex_);
    keeps_freed_ = keeps;
  }
  if (keeps) return;
  stop_watch();
  release();
}

void MemoryCache::unmap(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) ::munmap(block.memory, block.bytes);
}

void* MemoryCache::take(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  bytes = at::round_up(std::max<size_t>(bytes, 1), page_bytes());
  std::vector<Block> unused;
  {
    std::lock_guard lock(mutex_);
    const auto fit = idle_by_bytes_.lower_bound({bytes, INT64_MIN});
    if (fit != idle_by_bytes_.end() && fit->first <= bytes + bytes / 8) {
      const Block block = take_idle(idle_.find(fit->second));
      count_live(block.bytes);
      live_.emplace(block.memory, block.bytes);
      ++stats_.reused;
      return block.memory;
    }
    if (live_.size() >= kMostBlocks) return nullptr;
    count_live(bytes);
    const int64_t most_bytes = stats_.peak_live_bytes + stats_.peak_live_bytes / 8;
    while (!idle_.empty() &&
           (stats_.live_bytes + stats_.idle_bytes > most_bytes || live_.size() + idle_.size() >= kMostBlocks))
      unused.push_back(take_idle(std::prev(idle_.end())));
  }
  void* block = remake_one_of(unused, bytes);
  const bool is_remade = block != nullptr;
  unmap(unused);
  if (block == nullptr) block = map_block(bytes);
  if (block == nullptr) {  // unmapping idle blocks may help
    release();
    block = map_block(bytes);
  }
  std::lock_guard lock(mutex_);
  if (block == nullptr) {
    stats_.live_bytes -= static_cast<int64_t>(bytes);
    stats_.peak_live_bytes = stats_.live_bytes;  // restarts the peak, as release() does
    return nullptr;
  }
  live_.emplace(block, bytes);
  ++(is_remade ? stats_.remade : stats_.mapped);
  return block;
}

// Places a block that is smaller than a huge page behind the previous block, so that both are in one huge page. If one
// of them is unmapped later, the page is split.
void* MemoryCache::map_block(size_t bytes) {
  if (bytes >= kHugePageBytes) return map_pages(bytes);
  std::lock_guard lock(mutex_);
  if (shared_.left_bytes < bytes) {
    auto* const more = static_cast<std::byte*>(map_pages(kSharedBytes));
    if (more == nullptr) return map_pages(bytes);
    unmap_shared_rest();
    shared_.next = more;
    shared_.left_bytes = kSharedBytes;
  }
  shared_.left_bytes -= bytes;
  return std::exchange(shared_.next, shared_.next + bytes);
}

void MemoryCache::unmap_shared_rest() {
  if (shared_.left_bytes > 0) ::munmap(shared_.next, std::exchange(shared_.left_bytes, 0));
}

// Resizes one of the blocks that would be unmapped: the smallest that is large enough, or else the largest. This helps
// if request sizes differ between steps, because existing pages need not be cleared again.
void* MemoryCache::remake_one_of(std::vector<Block>& unused, size_t bytes) {
  const auto is_better = [bytes](const Block& one, const Block& other) {
    const bool is_enough = one.bytes >= bytes;
    if (is_enough != (other.bytes >= bytes)) return is_enough;
    return is_enough ? one.bytes < other.bytes : one.bytes > other.bytes;
  };
  const auto best = std::ranges::min_element(unused, is_better);
  if (best == unused.end()) return nullptr;
  void* const memory = resize_pages(best->memory, best->bytes, bytes);
  if (memory != nullptr) unused.erase(best);
  return memory;
}

void MemoryCache::count_live(size_t bytes) {
  stats_.live_bytes += static_cast<int64_t>(bytes);
  stats_.peak_live_bytes = std::max(stats_.peak_live_bytes, stats_.live_bytes);
}

MemoryCache::Block MemoryCache::take_idle(std::map<Stamp, Block>::iterator idle) {
  const auto [stamp, block] = *idle;
  stats_.idle_bytes -= static_cast<int64_t>(block.bytes);
  if (block.is_on_call) pressure_.on_call_bytes -= static_cast<int64_t>(block.bytes);
  idle_by_bytes_.erase({block.bytes, stamp});
  idle_.erase(idle);
  return block;
}

bool MemoryCache::give(void* memory) {
  Block block{memory, 0, pressure_.is_tight.load(std::memory_order_relaxed), rank_of_thread};
  bool looks = false;
  {
    std::lock_guard lock(mutex_);
    const auto live = live_.extract(memory);
    if (live.empty()) return false;
    block.bytes = live.mapped();
    stats_.live_bytes -= static_cast<int64_t>(block.bytes);
    if (!keeps_freed_) return unmap_freed(block);
    pressure_.given_bytes += block.bytes;
    looks = !pressure_.limits.empty() && pressure_.given_bytes >= kLookEveryBytes;
    if (looks) pressure_.given_bytes = 0;
    if (looks && !watch_) start_watch();
  }
  if (block.is_on_call) ::madvise(block.memory, block.bytes, MADV_FREE);  // the system may take its pages
  {
    std::lock_guard lock(mutex_);
    if (!keeps_freed_) return unmap_freed(block);  // set_keeps_freed(false) was called meanwhile
    stats_.idle_bytes += static_cast<int64_t>(block.bytes);
    if (block.is_on_call) pressure_.on_call_bytes += static_cast<int64_t>(block.bytes);
    const Stamp stamp = --last_stamp_;
    idle_.emplace(stamp, block);
    idle_by_bytes_.emplace(block.bytes, stamp);
  }
  if (looks) look_at_limits();
  return true;
}

bool MemoryCache::unmap_freed(const Block& block) {
  ::munmap(block.memory, block.bytes);
  if (live_.empty() && idle_.empty()) unmap_shared_rest();
  return true;
}

// If over half of a memory limit is needed, marks idle blocks MADV_FREE, now and whenever a block becomes idle. Else
// stops marking, because a mark costs as much as writing a tenth of the block (all, if pages are small). Returns the
// memory that all limits leave.
int64_t MemoryCache::look_at_limits() {
  int64_t left_bytes = INT64_MAX, left_of_half_bytes = INT64_MAX;
  for (const MemoryLimit& limit : pressure_.limits) {
    const int64_t left = limit.left_bytes();
    left_bytes = std::min(left_bytes, left);
    left_of_half_bytes = std::min(left_of_half_bytes, left - limit.limit_bytes / 2);
  }
  std::lock_guard lock(mutex_);
  const bool is_tight = pressure_.on_call_bytes > left_of_half_bytes;  // counts on-call blocks as used
  if (pressure_.is_tight.exchange(is_tight) == is_tight || !is_tight) return left_bytes;
  for (auto& [stamp, block] : idle_) {
    if (std::exchange(block.is_on_call, true)) continue;
    ::madvise(block.memory, block.bytes, MADV_FREE);
    pressure_.on_call_bytes += static_cast<int64_t>(block.bytes);
  }
  return left_bytes;
}

// give() checks the limit only when tensors are freed, but other memory may grow too. So a separate thread checks the
// limit again before other memory could fill half of the memory that is left.
void MemoryCache::start_watch() {
  constexpr double kFillBytesPerSecond = 4e9;
  watch_ = std::make_shared<Watch>();
  watch_->cache = this;
  const auto look = [watch = watch_] {
    for (double seconds = 0;;) {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      std::lock_guard lock(watch->mutex);
      if (watch->cache == nullptr) return;
      const auto left_bytes = static_cast<double>(watch->cache->look_at_limits());
      seconds = std::clamp(left_bytes / 2 / kFillBytesPerSecond, 0.005, 1.0);
    }
  };
  ::sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's own threads handle signals
  try {
    std::thread(look).detach();
  } catch (const std::system_error&) {  // no thread can start: only give() checks the limit
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void MemoryCache::stop_watch() {
  std::shared_ptr<Watch> watch;
  {
    std::lock_guard lock(mutex_);
    watch = std::exchange(watch_, nullptr);
  }
  if (!watch) return;
  std::lock_guard lock(watch->mutex);
  watch->cache = nullptr;
}

void MemoryCache::release(int rank) {
  std::vector<Block> unused;
  {
    std::lock_guard lock(mutex_);
    for (auto idle = idle_.begin(); idle != idle_.end();) {
      const auto next = std::next(idle);
      if (rank == kNoRank || idle->second.rank == rank || idle->second.rank == kNoRank)
        unused.push_back(take_idle(idle));
      idle = next;
    }
    stats_.peak_live_bytes = stats_.live_bytes + stats_.idle_bytes;
    if (live_.empty() && idle_.empty()) unmap_shared_rest();
  }
  unmap(unused);
}

MemoryCache::Stats MemoryCache::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

namespace {

std::atomic<bool> is_on{false};

// The cache of the process; null until start_caching_memory(). Never destroyed: tensors may outlive static objects.
std::atomic<MemoryCache*> process_cache{nullptr};

// Makes the cache. Locks its mutex around each fork(), which could otherwise copy a mutex that another thread holds.
[[maybe_unused]] MemoryCache& make_process_cache() {
  static auto* const cache = [] {
    auto* const made = new MemoryCache(memory_limits(ControlGroups::of_this_process()));
    process_cache = made;
    ::pthread_atfork([] { process_cache.load()->before_fork(); },
                     [] { process_cache.load()->after_fork(/*is_child=*/false); },
                     [] { process_cache.load()->after_fork(/*is_child=*/true); });
    return made;
  }();
  return *cache;
}

void free_memory(void* memory) {
  MemoryCache* const cache = process_cache;
  // Blocks are page-aligned. malloc's memory rarely is, because a header precedes it. So give() is rarely in vain.
  const bool may_be_block = cache != nullptr && reinterpret_cast<uintptr_t>(memory) % page_bytes() == 0;
  if (!may_be_block || !cache->give(memory)) return c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
  c10::profiledCPUMemoryReporter().Delete(memory);
}

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes >= MemoryCache::kSmallestBytes && is_on.load(std::memory_order_relaxed))
      memory = process_cache.load()->take(bytes);
    if (memory != nullptr) {
      c10::profiledCPUMemoryReporter().New(memory, bytes);
    } else {
      memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);  // throws if there is no memory
    }
    return {memory, memory, &free_memory, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

c10::Allocator* memory_cache_allocator() {
  static auto* const allocator = new CachingAllocator;
  return allocator;
}

// Sets the allocator `to`, unless the program has replaced `from`.
static void replace_cpu_allocator(c10::Allocator* from, c10::Allocator* to) {
  if (c10::GetCPUAllocator() == from) c10::SetCPUAllocator(to);
}

void start_caching_memory() {
#ifndef __SANITIZE_ADDRESS__
  if (c10::utils::check_env("TESSERA_MEMORY_CACHE") == false) return;
  make_process_cache().set_keeps_freed(true);
  is_on = true;
  replace_cpu_allocator(c10::GetDefaultCPUAllocator(), memory_cache_allocator());
#endif
}

void stop_caching_memory() {
  if (!is_on.exchange(false)) return;
  replace_cpu_allocator(memory_cache_allocator(), c10::GetDefaultCPUAllocator());
  process_cache.load()->set_keeps_freed(false);
}

void set_memory_rank_of_thread(int rank) { rank_of_thread = rank; }

}  // namespace tessera::internal

namespace tessera {
using namespace internal;

MemoryCacheStats memory_cache_stats() {
  const MemoryCache* const cache = process_cache;
  return cache == nullptr ? MemoryCacheStats{} : cache->stats();
}

void release_freed_memory() {
  if (MemoryCache* const cache = process_cache) cache->release(rank_of_thread);
#ifdef __GLIBC__
  // Once a block below 32 MiB was freed, glibc keeps later freed blocks up to its size. malloc_trim() returns them to
  // the system. Only one thread trims at a time: if another allocator replaces malloc, glibc's initializes itself
  // here without a lock. Other threads only count a request, because fork() could copy a locked mutex.
  static std::atomic<int> requests{0};
  if (requests.fetch_add(1) > 0) return;
  int seen = 0;
  do {
    seen = requests;
    ::malloc_trim(0);
  } while (!requests.compare_exchange_strong(seen, 0));
#endif
}

}  // namespace tessera
