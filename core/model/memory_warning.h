#pragma once

#include <cstdint>
#include <string>

#include <tessera/communicator.h>
#include <tessera/plan/planned_memory.h>

namespace tessera::internal {

// What a wrapper will hold on this rank, whatever the optimizer and the activations come to.
struct MemoryNeed {
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t in_use_bytes = 0;   // units that are gathered at a time
  int64_t freed_bytes = 0;    // of parameters that are there already, and go
  int64_t present_bytes = 0;  // of those that are there, and stay
};

// What is to be said where `ranks` such ranks share `free_bytes` of memory, of which each takes what is planned or else
// what is needed; "" if there is room.
std::string memory_warning(const std::string& who, const MemoryNeed& need, int ranks, int64_t free_bytes);

// TORCH_WARNs so: before a wrapper takes memory, since on Linux the one who takes too much is killed and says nothing.
// On the CPU the first rank of each host speaks for all of them, on accelerators each for its own. Says nothing in a
// dry run, nor where free memory is not known. Not collective, does not throw.
void warn_if_short_of_memory(const std::string& who, const MemoryNeed& need, const Communicator& comm);

}  // namespace tessera::internal
