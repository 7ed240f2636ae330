#pragma once

#include <memory>

#include <tessera/communicator.h>

namespace tessera::internal {

// The groups of hybrid sharding (a device mesh of two dimensions). For 6 ranks with copies of 2 ranks each:
//
//     shard: 0 1 | 2 3 | 4 5      one copy of the model each
//     replicas: 0 2 4 | 1 3 5     the ranks of one group hold equal shards
//
// A copy of 4 ranks with secondary copies of 2:
//
//     shard:     0 1 2 3 | 4 5 6 7
//     secondary: 0 1 | 2 3 | 4 5 | 6 7     each rank keeps a half of the gathered parameters for backward
struct Mesh {
  std::shared_ptr<Communicator> world;
  std::shared_ptr<Communicator> shard;      // equals `world` if there is one copy
  std::shared_ptr<Communicator> replicas;   // null if there is one copy
  std::shared_ptr<Communicator> secondary;  // null without secondary copies, or if they would equal `shard`

  int copy() const { return replicas ? replicas->rank() : 0; }
  int copies() const { return replicas ? replicas->size() : 1; }
};

// Splits `world` into these groups. A count of 0 means one copy over all ranks, or no secondary copies. Collective,
// unless each count is 0 or the world size. Throws std::invalid_argument if a count is negative, if ranks_per_copy does
// not divide the world size, or if ranks_per_secondary_copy does not divide the size of a copy.
Mesh make_mesh(std::shared_ptr<Communicator> world, int ranks_per_copy, int ranks_per_secondary_copy);

}  // namespace tessera::internal
