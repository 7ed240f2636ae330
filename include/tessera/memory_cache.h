#pragma once

#include <cstdint>

namespace tessera {

// Bytes and numbers of blocks.
struct MemoryCacheStats {
  int64_t live_bytes = 0;       // in blocks, which are whole pages
  int64_t idle_bytes = 0;       // kept for what comes
  int64_t peak_live_bytes = 0;  // since the start or the last release()
  int64_t mapped = 0;           // how many blocks, since the start
  int64_t remade = 0;           // how often an idle one was cut or grown to become another, since the start
  int64_t reused = 0;           // how often one was used again, since the start
};

// Statistics of the cache of CPU memory that ProcessSetup::cache_memory starts (<tessera/launch.h>); zeros if it was
// never started. Thread-safe.
MemoryCacheStats memory_cache_stats();

// Gives back to the system what was freed: the cache's idle blocks and what malloc keeps. For when what
// came before was not typical of what follows. (torch.cuda.empty_cache, for the CPU.) Any thread; one that is a rank
// leaves the cache's blocks that other ranks' threads have freed, who are in the middle of a step, maybe.
void release_freed_memory();

}  // namespace tessera
