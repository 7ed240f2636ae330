#pragma once

#include <memory>

#include "tessera/comm/communicator.h"

namespace tessera {

// Who shards with whom, and who holds the same (a device mesh of two dimensions). World ranks, copies of 2 ranks each:
//
//     shard: 0 1 | 2 3 | 4 5      one copy of the model each
//     replicas: 0 2 4 | 1 3 5     the same part of it each
struct Mesh {
  std::shared_ptr<Communicator> world;
  std::shared_ptr<Communicator> shard;     // == world if there is one copy
  std::shared_ptr<Communicator> replicas;  // null if there is one copy

  int copy() const { return replicas ? replicas->rank() : 0; }
  int copies() const { return replicas ? replicas->size() : 1; }
};

// Collective, unless ranks_per_copy is 0 or the world's size. Throws std::invalid_argument if it
// does not divide that.
Mesh make_mesh(std::shared_ptr<Communicator> world, int ranks_per_copy);

}  // namespace tessera
