#include "core/layout/mesh.h"

#include <c10/util/StringUtil.h>

#include <stdexcept>

namespace tessera::internal {
namespace {

void require_divisor(const char* name, int value, const char* of, int whole) {
  if (value < 0 || (value > 0 && whole % value != 0))
    throw std::invalid_argument(c10::str(name, " is ", value, ", expected a divisor of ", of, ", ", whole, ", or 0"));
}

}  // namespace

Mesh make_mesh(std::shared_ptr<Communicator> world, int ranks_per_copy, int ranks_per_secondary_copy) {
  require_divisor("ranks_per_copy", ranks_per_copy, "the number of ranks", world->size());
  const int copy_ranks = ranks_per_copy == 0 ? world->size() : ranks_per_copy;
  require_divisor("ranks_per_secondary_copy", ranks_per_secondary_copy, "the number of ranks that share a copy",
                  copy_ranks);
  Mesh mesh{world, world, nullptr, nullptr};
  if (copy_ranks != world->size()) {
    mesh.shard = world->split_by([=](int rank) { return rank / copy_ranks; });
    mesh.replicas = world->split_by([=](int rank) { return rank % copy_ranks; });
  }
  // No secondary copy spans two copies, because the ranks of a copy are consecutive.
  if (ranks_per_secondary_copy != 0 && ranks_per_secondary_copy != copy_ranks)
    mesh.secondary = world->split_by([=](int rank) { return rank / ranks_per_secondary_copy; });
  return mesh;
}

}  // namespace tessera::internal
