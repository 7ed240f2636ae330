#pragma once

#include <cstdint>

namespace tessera {

// The state of the memory cache, in bytes and numbers of blocks.
struct MemoryCacheStats {
  int64_t live_bytes = 0;       // bytes in use, rounded up to whole pages
  int64_t idle_bytes = 0;       // bytes kept for reuse
  int64_t peak_live_bytes = 0;  // peak of live_bytes since the start or the last release_freed_memory()
  int64_t mapped = 0;           // number of blocks mapped since the start
  int64_t remade = 0;           // number of idle blocks resized to serve another size, since the start
  int64_t reused = 0;           // number of blocks reused, since the start
};

// Returns the state of the cache that ProcessSetup::cache_memory starts (<tessera/launch.h>); zeros if the cache was
// never started. Thread-safe.
MemoryCacheStats memory_cache_stats();

// Returns freed memory to the system: the cache's idle blocks and malloc's free memory (torch.cuda.empty_cache for the
// CPU). Useful after a phase with unusual sizes. Thread-safe. If ranks are threads, keeps blocks that other ranks have
// freed, because those ranks may be in the middle of a step.
void release_freed_memory();

}  // namespace tessera
