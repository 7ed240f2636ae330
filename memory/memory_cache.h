#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

// Keeps the memory of large CPU tensors for the next ones of their size, as libtorch does on devices
// (CUDACachingAllocator). A training step asks for the same blocks each time. glibc serves them badly:
// a hole that a gradient of 16 MB left does not take the next one, by the few bytes that aligning asks
// for, and what it gives back to the system comes again as 4,000 page faults.
//
// A block is a mapping of its own, in huge pages where the system grants them (transparent_hugepage:
// madvise or always). One is used again for a request of up to 1/8 less, the one freed last first,
// while it may still be in a processor's cache. What is live and idle together stays below 9/8 of the
// most that was live at one time: before it maps a new block, it unmaps those that were idle longest.
//
// Thread-safe. docs/launch.md has what it is worth.
class MemoryCache {
 public:
  static constexpr size_t kSmallestBytes = size_t{256} << 10;  // below, malloc does well
  static constexpr size_t kMostBlocks = size_t{1} << 14;       // a process may have 65,530 mappings

  struct Stats {
    int64_t live_bytes = 0;          // in blocks, which are whole pages
    int64_t idle_bytes = 0;          // kept for what comes
    int64_t peak_live_bytes = 0;     // since the start or the last release()
    int64_t mapped = 0, reused = 0;  // how many blocks, since the start
  };

  MemoryCache() = default;
  ~MemoryCache();  // nothing may be live
  MemoryCache(const MemoryCache&) = delete;
  MemoryCache& operator=(const MemoryCache&) = delete;

  // At least `bytes` bytes, not initialised, at the start of a page; null if the system has no more or
  // there are kMostBlocks.
  void* take(size_t bytes);
  // False if that is not a block of this cache.
  bool give(void* block);
  // Gives what is idle back to the system. The bound starts again from what is live.
  void release();
  Stats stats() const;

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };
  // Counts down, so that of equal sizes the one freed last comes first.
  using Stamp = int64_t;

  void* reuse(size_t bytes);
  Block take_idle(std::map<Stamp, Block>::iterator idle);
  static void unmap(const std::vector<Block>& blocks);

  mutable std::mutex mutex_;
  std::unordered_map<void*, size_t> live_;
  std::map<Stamp, Block> idle_;
  std::set<std::pair<size_t, Stamp>> idle_by_bytes_;
  Stamp last_stamp_ = 0;
  size_t live_bytes_ = 0, idle_bytes_ = 0, peak_live_bytes_ = 0;
  int64_t mapped_ = 0, reused_ = 0;
};

// From now on CPU tensors of MemoryCache::kSmallestBytes or more, whatever makes them, have their memory
// from one MemoryCache of the process; those that are there keep theirs. What init() and run_ranks() do
// unless InitOptions::cache_memory is false. Nothing happens if TESSERA_MEMORY_CACHE=0 is in the
// environment, if the program has set an allocator of its own (c10::SetCPUAllocator), or in a build with
// AddressSanitizer, which has to see each tensor come and go. While no other thread makes tensors: so
// libtorch asks.
void cache_memory();

MemoryCache::Stats memory_cache_stats();

// Gives back to the system what was freed: the cache's idle blocks and what malloc keeps. For when what
// came before was not typical of what follows. (torch.cuda.empty_cache, for the CPU.) Any thread.
void release_freed_memory();

// The allocator that cache_memory() puts in libtorch; it hands everything on to libtorch's own before that.
// For allocators that stand before it, as PeakMemory's does.
c10::Allocator* memory_cache_allocator();

}  // namespace tessera
