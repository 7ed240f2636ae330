#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

namespace tessera::internal {

// Which rank owns which of the parameters: a value, the same on every rank.
struct Partition {
  std::vector<int> owners;           // by parameter
  std::vector<int64_t> owned_bytes;  // by rank, of what was weighed

  friend bool operator==(const Partition&, const Partition&) = default;
};

// Gives each parameter, largest first, to the rank that has least so far (the lowest of several):
// the heaviest rank is then within one parameter of the mean. (FairScale's OSS, and
// torch.distributed's ZeroRedundancyOptimizer; Graham's longest-processing-time rule.)
// `already_bytes` is what the ranks own to begin with, if anything, and is counted in.
// Throws std::invalid_argument for world_size < 1.
Partition partition_greedily(const std::vector<int64_t>& parameter_bytes, int world_size,
                             const std::vector<int64_t>& already_bytes = {});

// "rank 0: 3 parameters, 1200 bytes; rank 1: ..."
std::ostream& operator<<(std::ostream& stream, const Partition& partition);

}  // namespace tessera::internal
