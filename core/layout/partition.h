#pragma once

#include <cstdint>
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

}  // namespace tessera::internal
