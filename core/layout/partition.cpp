#include "core/layout/partition.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera::internal {

Partition partition_greedily(const std::vector<int64_t>& parameter_bytes, int world_size,
                             const std::vector<int64_t>& already_bytes) {
  if (world_size < 1)
    throw std::invalid_argument("a partition over " + std::to_string(world_size) + " ranks, expected at least 1");
  std::vector<size_t> largest_first(parameter_bytes.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::ranges::stable_sort(largest_first, [&](size_t a, size_t b) { return parameter_bytes[a] > parameter_bytes[b]; });
  using Load = std::pair<int64_t, int>;  // (bytes, rank)
  std::priority_queue<Load, std::vector<Load>, std::greater<>> lightest;
  Partition partition{std::vector<int>(parameter_bytes.size()), already_bytes};
  partition.owned_bytes.resize(world_size);
  for (int rank = 0; rank < world_size; ++rank) lightest.emplace(partition.owned_bytes[rank], rank);
  for (size_t parameter : largest_first) {
    const auto [bytes, rank] = lightest.top();
    lightest.pop();
    partition.owners[parameter] = rank;
    partition.owned_bytes[rank] = bytes + parameter_bytes[parameter];
    lightest.emplace(partition.owned_bytes[rank], rank);
  }
  return partition;
}

}  // namespace tessera::internal
