#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/memory_cache.h>

#include "core/memory/container_limits.h"

namespace tessera::internal {

// Caches the memory of large CPU tensors, as CUDACachingAllocator does for devices. Every training step requests blocks
// of the same sizes. glibc handles that slowly: a freed 16 MB gradient leaves a hole that is a few alignment bytes too
// small for the next one. If glibc returns the memory to the system, allocating it again costs 4,000 page faults.
//
// Blocks are in huge pages if the system grants them (transparent_hugepage: madvise or always). A block of at least a
// huge page has its own mapping. Smaller blocks share mappings, and are unmapped separately. A request takes the
// smallest idle block that is at most 1/8 too large; of equal blocks, the last freed (perhaps still in a CPU cache).
//
// Live and idle blocks together take at most 9/8 of the peak of live bytes. Before a new block is mapped, the blocks
// that have been idle longest are unmapped, and one of them is resized to become the new block (mremap). If the
// processes of a control group need more than half of its memory limit, idle blocks are marked MADV_FREE. Then the
// system can take their pages instead of killing the process. A thread checks the need at intervals, because
// memory other than tensors may grow too. Thread-safe. docs/launch.md has measurements.
class MemoryCache {
 public:
  static constexpr size_t kSmallestBytes = size_t{256} << 10;  // malloc handles smaller blocks well
  static constexpr size_t kMostBlocks = size_t{1} << 14;       // a process may have 65,530 mappings

  using Stats = MemoryCacheStats;

  // `limits` are those of the process's control groups.
  explicit MemoryCache(std::vector<MemoryLimit> limits = {}) : pressure_{std::move(limits)} {}
  ~MemoryCache();  // no block may be live
  MemoryCache(const MemoryCache&) = delete;
  MemoryCache& operator=(const MemoryCache&) = delete;

  // Allocates at least `bytes` uninitialised bytes, page-aligned. Returns null if the system is out of memory or
  // kMostBlocks blocks are live.
  void* take(size_t bytes);
  // Frees a block. Returns false if `block` is not a block of this cache.
  bool give(void* block);
  // Sets whether freed blocks are kept for reuse (default: true). If false, releases idle blocks and ends the thread.
  void set_keeps_freed(bool keeps);
  static constexpr int kNoRank = -1;  // the rank of a thread that has none
  // Returns idle blocks to the system: with kNoRank all, otherwise those freed by threads of `rank` or of no rank.
  // The peak of live bytes restarts from the sum of the live bytes and the remaining idle bytes.
  void release(int rank = kNoRank);
  Stats stats() const;

  // Must be called before fork(). Otherwise a mutex that another thread has locked would stay locked in the child.
  void before_fork() { mutex_.lock(); }
  // Must be called after fork(), in both processes.
  void after_fork(bool is_child) {
    if (is_child) watch_.reset();  // the watch's thread does not exist in the child
    mutex_.unlock();
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
    bool is_on_call = false;  // true: idle and marked MADV_FREE
    int rank = kNoRank;       // rank of the thread that freed the block
  };
  // A mapping shared by blocks that are smaller than a huge page.
  struct SharedMapping {
    std::byte* next = nullptr;  // address of the next block
    size_t left_bytes = 0;
  };
  // The memory limits of the control groups, and how close their processes are to them.
  struct Pressure {
    const std::vector<MemoryLimit> limits;
    size_t given_bytes = 0;     // bytes freed since the last check of the limits
    int64_t on_call_bytes = 0;  // idle bytes that are marked MADV_FREE
    std::atomic<bool> is_tight = false;
  };
  // Stamps decrease, so that among blocks of one size the one freed last sorts first.
  using Stamp = int64_t;

  // Shared with the cache's thread, which may outlive the cache.
  struct Watch {
    std::mutex mutex;
    MemoryCache* cache;  // null if the thread must end
  };

  static constexpr size_t kLookEveryBytes = size_t{32} << 20;

  void count_live(size_t bytes);
  int64_t look_at_limits();
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
  SharedMapping shared_;
  Pressure pressure_;
  bool keeps_freed_ = true;
  std::shared_ptr<Watch> watch_;  // null if there is no thread
  Stats stats_;
};

// Sets the rank of this thread for MemoryCache::release(), in a process with a thread for each rank.
void set_memory_rank_of_thread(int rank);

// Makes the cache libtorch's CPU allocator, for new CPU tensors of 256 KiB or more. A no-op if TESSERA_MEMORY_CACHE=0
// is in the environment, if the program has set an allocator (c10::SetCPUAllocator), or in a build with
// AddressSanitizer, which must see every allocation. Must be called while no other thread makes tensors, as libtorch
// requires. The cache's fork handlers stay until the process ends.
void start_caching_memory();
// Restores libtorch's allocator and frees idle blocks. Live tensors stay valid: their blocks are unmapped when they are
// freed. Must be called while no other thread makes tensors.
void stop_caching_memory();

// Returns the cache's allocator. It forwards small requests to libtorch's own allocator, and all requests while the
// cache is off. Allocators that count memory, such as PeakMemory's, forward to it.
c10::Allocator* memory_cache_allocator();

}  // namespace tessera::internal
