#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/memory_cache.h>

#include "core/memory/container_limits.h"

namespace tessera::internal {

// Keeps the memory of large CPU tensors for the next ones of their size, as libtorch does on devices
// (CUDACachingAllocator). A training step asks for the same blocks each time, and glibc serves them badly: a hole that
// a gradient of 16 MB left does not take the next one, by the few bytes that aligning asks for, and what it gives
// back to the system comes again as 4,000 page faults.
//
// A block is in huge pages where the system grants them (transparent_hugepage: madvise or always): a mapping of its
// own, or, if it is smaller than such a page, beside others, and unmapped by itself all the same. It is used again for
// a request of up to 1/8 less, the one freed last first, while it may still be in a processor's cache. Live and idle
// blocks together stay below 9/8 of the most that was live at one time: before a new block is mapped, those that were
// idle longest go, and one of them becomes the new one, cut or grown where its pages are (mremap). Where a control
// group limits memory, and the processes in it need more than half of that, the system may take the pages of idle
// blocks whenever it is short of any (MADV_FREE), rather than end the process. A thread looks at what they need while
// there are idle blocks, since what takes the rest need not be tensors. Thread-safe. docs/launch.md has what it is
// worth.
class MemoryCache {
 public:
  static constexpr size_t kSmallestBytes = size_t{256} << 10;  // below, malloc does well
  static constexpr size_t kMostBlocks = size_t{1} << 14;       // a process may have 65,530 mappings

  using Stats = MemoryCacheStats;

  // `limit`: of the control group, whose share idle blocks yield; empty: none.
  explicit MemoryCache(std::optional<MemoryLimit> limit = std::nullopt) : limit_(std::move(limit)) {}
  ~MemoryCache();  // nothing may be live
  MemoryCache(const MemoryCache&) = delete;
  MemoryCache& operator=(const MemoryCache&) = delete;

  // At least `bytes` bytes, not initialised, at the start of a page; null if the system has no more or
  // there are kMostBlocks.
  void* take(size_t bytes);
  // Returns false if that is not a block of this cache.
  bool give(void* block);
  // Whether freed blocks are kept for reuse, the default. False also releases the idle blocks and ends the cache's
  // thread.
  void set_keeps_freed(bool keeps);
  static constexpr int kNoRank = -1;  // of none
  // Gives what is idle back to the system: all, or what was freed by threads of this rank and of none. The bound starts
  // again from what is left.
  void release(int rank = kNoRank);
  // As of now.
  Stats stats() const;

  // Around fork(): the child would wait for ever for a lock that a thread had which it does not have.
  void before_fork() { mutex_.lock(); }
  // In both processes.
  void after_fork(bool is_child) {
    if (is_child) watch_.reset();  // whose thread stays with the parent
    mutex_.unlock();
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
    bool is_on_call = false;  // idle, and the system may take its pages
    int rank = kNoRank;       // of the thread that freed it
  };
  // Counts down, so that of equal sizes the one freed last comes first.
  using Stamp = int64_t;

  // What a thread of the cache's knows of it, which it may outlive.
  struct Watch {
    std::mutex mutex;
    MemoryCache* cache;  // null: it is gone
  };

  static constexpr size_t kLookEveryBytes = size_t{32} << 20;

  void count_live(size_t bytes);
  int64_t look_at_limit();
  void start_watch();
  void stop_watch();
  void* map_block(size_t bytes);
  void unmap_shared_rest();
  bool unmap_freed(const Block& block);
  Block take_idle(std::map<Stamp, Block>::iterator idle);
  static void* remake_one_of(std::vector<Block>& unused, size_t bytes);
  static void unmap(const std::vector<Block>& blocks);

  mutable std::mutex mutex_;
  std::unordered_map<void*, size_t> live_;
  std::map<Stamp, Block> idle_;
  std::set<std::pair<size_t, Stamp>> idle_by_bytes_;
  Stamp last_stamp_ = 0;
  std::byte* shared_next_ = nullptr;  // where the next block below a huge page will be
  size_t shared_left_bytes_ = 0;      // mapped from there on
  size_t given_bytes_ = 0;            // since the last look at the limit
  int64_t on_call_bytes_ = 0;         // idle, and the system's to take
  const std::optional<MemoryLimit> limit_;
  std::atomic<bool> is_tight_ = false;
  bool keeps_freed_ = true;
  std::shared_ptr<Watch> watch_;  // null: no thread looks
  Stats stats_;
};

// This thread is one of several ranks of the process.
void set_memory_rank_of_thread(int rank);

// Makes the cache libtorch's CPU allocator: new CPU tensors of 256 KiB or more use it. A no-op if
// TESSERA_MEMORY_CACHE=0 is in the environment, if the program has set an allocator of its own (c10::SetCPUAllocator),
// or in a build with AddressSanitizer, which must see each allocation. No other thread may create tensors meanwhile:
// libtorch requires this. The fork handlers of the cache stay until the process ends.
void start_caching_memory();
// Restores libtorch's own allocator and frees idle blocks. Live tensors stay valid: the cache unmaps their blocks when
// they are freed. The same precondition.
void stop_caching_memory();

// The cache's allocator. It uses libtorch's own while the cache is off. For allocators that wrap it, such as
// PeakMemory's.
c10::Allocator* memory_cache_allocator();

}  // namespace tessera::internal
