#include "tessera/flat/mesh.h"

#include <stdexcept>
#include <string>

namespace tessera {

Mesh make_mesh(std::shared_ptr<Communicator> world, int ranks_per_copy) {
  const int size = world->size();
  if (ranks_per_copy < 0 || (ranks_per_copy > 0 && size % ranks_per_copy != 0))
    throw std::invalid_argument("ranks_per_copy is " + std::to_string(ranks_per_copy) +
                                ", expected a divisor of the number of ranks, " + std::to_string(size) + ", or 0");
  if (ranks_per_copy == 0 || ranks_per_copy == size) return {world, world, nullptr};
  auto shard = world->split_by([=](int rank) { return rank / ranks_per_copy; });
  auto replicas = world->split_by([=](int rank) { return rank % ranks_per_copy; });
  return {std::move(world), std::move(shard), std::move(replicas)};
}

}  // namespace tessera
