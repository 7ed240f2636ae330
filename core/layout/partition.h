#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

namespace tessera::internal {

// The owner of each parameter. All ranks compute the same owners.
struct Partition {
  std::vector<int> owners;           // by parameter
  std::vector<int64_t> owned_bytes;  // by rank

  friend bool operator==(const Partition&, const Partition&) = default;
};

// Assigns each parameter, largest first, to the rank with the fewest bytes (the lowest such rank). `already_bytes` has
// the bytes that each rank owns before the call. If `already_bytes` is empty, no rank exceeds the mean by more than one
// parameter. Throws std::invalid_argument for world_size < 1. (Graham's longest-processing-time rule, as in FairScale's
// OSS and torch.distributed's ZeroRedundancyOptimizer.)
Partition partition_greedily(const std::vector<int64_t>& parameter_bytes, int world_size,
                             const std::vector<int64_t>& already_bytes = {});

// Writes "rank 0: 3 parameters, 1200 bytes; rank 1: ...".
std::ostream& operator<<(std::ostream& stream, const Partition& partition);

}  // namespace tessera::internal
