#pragma once

#include <cstdint>
#include <string>

#include <tessera/communicator.h>
#include <tessera/plan/planned_memory.h>

namespace tessera::internal {

// The bytes that a wrapper needs on this rank, without optimizer state and activations.
struct MemoryNeed {
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t in_use_bytes = 0;   // unsharded parameters of all units that are unsharded at the same time
  int64_t freed_bytes = 0;    // parameters that are in memory now and will be freed
  int64_t present_bytes = 0;  // parameters that are in memory now and stay there
};

// Returns a warning if `ranks` ranks together need more than `free_bytes`; otherwise "". In a PlannedMemoryScope, the
// planned bytes replace the sum of parameters, gradients and units in use.
std::string memory_warning(const std::string& who, const MemoryNeed& need, int ranks, int64_t free_bytes);

// Warns, before a wrapper allocates, if it needs more memory than is free: Linux may kill a process that runs out of
// memory, without a message. On the CPU, the first rank of each host warns for all its ranks. On accelerators, each
// rank warns for itself. A no-op in a dry run, or if the free memory is unknown. Not collective; does not throw.
void warn_if_short_of_memory(const std::string& who, const MemoryNeed& need, const Communicator& comm);

}  // namespace tessera::internal
