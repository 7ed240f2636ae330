#pragma once

#include <cstdint>
#include <string>

#include "tessera/comm/communicator.h"

namespace tessera {

// What a wrapper will hold on this rank, in bytes, whatever the optimizer and the activations come to.
struct MemoryNeed {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t in_use = 0;  // units that are gathered at a time
  int64_t freed = 0;   // of what is there already, and goes
};

// What is to be said where `ranks` such ranks share `free_bytes` of memory; "" if there is room.
std::string memory_warning(const std::string& who, const MemoryNeed& need, int ranks, int64_t free_bytes);

// TORCH_WARNs so: before a wrapper takes memory, since on Linux the one who takes too much is killed and says nothing.
// On the CPU the first rank of each host speaks for all of them, on accelerators each for its own. Says nothing in a
// dry run, nor where free memory is not known. Not collective, does not throw.
void warn_if_short_of_memory(const std::string& who, const MemoryNeed& need, const Communicator& comm);

}  // namespace tessera
