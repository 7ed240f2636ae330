#pragma once

#include <cstdint>

namespace tessera {

// The state of the cache, in bytes and blocks.
struct MemoryCacheStats {
  int64_t live_bytes = 0;       // in use, in whole pages
  int64_t idle_bytes = 0;       // kept for reuse
  int64_t peak_live_bytes = 0;  // since the start or the last release()
  int64_t mapped = 0;           // number of blocks mapped since the start
  int64_t remade = 0;           // number of idle blocks resized to serve another size, since the start
  int64_t reused = 0;           // number of blocks reused, since the start
};

// The state of the cache that ProcessSetup::cache_memory starts (<tessera/launch.h>); zeros if it was never started.
// Thread-safe.
MemoryCacheStats memory_cache_stats();

// Returns freed memory to the system: the cache's idle blocks and malloc's free memory. Useful after an unusual phase
// of the program. (torch.cuda.empty_cache for the CPU.) Thread-safe. If ranks are threads, keeps the blocks that other
// ranks have freed: they may be in the middle of a step.
void release_freed_memory();

}  // namespace tessera
