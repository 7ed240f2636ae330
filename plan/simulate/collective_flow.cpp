#include "plan/simulate/collective_flow.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tessera::internal {
namespace {

// In gloo_collectives.cpp, an all-reduce or broadcast up to the first size is one exchange. An all-reduce of 2 ranks is
// one exchange up to the second size.
constexpr double kOneExchangeBytes = 1 << 16, kOneExchangeBytesOfTwo = 1 << 19;

}  // namespace

bool CollectiveFlow::sends(int exchange, bool from_root, bool to_root) const {
  if (exchange > 0 || (!first_is_rooted && !first_is_to_root)) return true;
  return first_is_to_root ? to_root : from_root;
}

CollectiveFlow flow_of(const RecordedCollective& collective) {
  const double bytes = static_cast<double>(collective.bytes), n = collective.ranks;
  const std::string& name = collective.operation;
  CollectiveFlow flow;
  flow.message_bytes[0] = flow.message_bytes[1] = bytes / n;
  if (name == "all-gather" || name == "all-to-all") return flow;
  if (name == "reduce-scatter") {
    flow.sum_bytes = (n - 1) * bytes / n;
  } else if (name == "all-reduce") {
    const bool is_whole = bytes <= (collective.ranks == 2 ? kOneExchangeBytesOfTwo : kOneExchangeBytes);
    flow.exchanges = is_whole ? 1 : 2;
    if (is_whole) flow.message_bytes[0] = bytes;
    flow.sum_bytes = (n - 1) * flow.message_bytes[0];
  } else if (name == "broadcast") {
    const bool is_whole = collective.ranks == 2 || bytes <= kOneExchangeBytes;
    flow.first_is_rooted = true;
    flow.exchanges = is_whole ? 1 : 2;  // two exchanges: a scatter of the root's parts, then an all-gather
    if (is_whole) flow.message_bytes[0] = bytes;
  } else if (name == "scatter") {
    flow.first_is_rooted = true;
  } else if (name == "reduce") {
    flow.first_is_to_root = flow.only_root_sums = true;
    flow.message_bytes[0] = bytes;
    flow.sum_bytes = (n - 1) * bytes;
  } else {
    refuse_collective(name);
  }
  return flow;
}

std::vector<int> group_of(const RecordedCollective& collective, int rank) {
  const int ranks = collective.ranks;
  std::vector<int> group(static_cast<size_t>(ranks));
  if (!collective.members) {
    std::iota(group.begin(), group.end(), 0);
    return group;
  }
  const std::vector<int>& members = *collective.members;
  if (ranks < 2 || std::ranges::find(members, rank) != members.end()) return members;
  const int apart = members[1] - members[0];
  const auto of_grid = [&](int of_rank) {
    const int first = of_rank / (apart * ranks) * apart * ranks + of_rank % apart;
    for (int i = 0; i < ranks; ++i) group[static_cast<size_t>(i)] = first + i * apart;
    return group;
  };
  if (apart < 1 || of_grid(members[0]) != members)
    throw std::invalid_argument("the time of a group of " + std::to_string(ranks) +
                                " ranks that are no row or column of a grid: expected a record of each rank of a host");
  return of_grid(rank);
}

double CollectiveWork::seconds(const LinkSpeed& link) const {
  const double copied_s = link.bytes_per_s > 0 ? 1 / link.bytes_per_s : 0;
  return operations * link.latency_s + copied_bytes * copied_s + summed_bytes * sum_s_per_byte(link);
}

CollectiveWork work_of(const RecordedCollective& collective) {
  const int n = collective.ranks;
  if (n < 2) return {};
  const CollectiveFlow flow = flow_of(collective);
  CollectiveWork work{static_cast<double>(latencies_of(collective) * flow.exchanges), 0,
                      flow.only_root_sums ? flow.sum_bytes / n : flow.sum_bytes};
  // Without a root, each rank copies n - 1 messages: of two ranks, each copies one. With a root, all ranks copy n - 1.
  for (int exchange = 0; exchange < flow.exchanges; ++exchange) {
    const bool is_rooted = exchange == 0 && (flow.first_is_rooted || flow.first_is_to_root);
    work.copied_bytes += (n - 1) * flow.message_bytes[exchange] / (is_rooted ? n : 1);
  }
  return work;
}

int latencies_of(const RecordedCollective& collective) {
  return std::bit_width(static_cast<unsigned>(std::max(collective.ranks, 1) - 1));
}

double sum_s_per_byte(const LinkSpeed& link) {
  if (!(link.reduced_bytes_per_s > 0) || !(link.bytes_per_s > 0)) return 0;
  return std::max(0.0, 1 / link.reduced_bytes_per_s - 1 / link.bytes_per_s);
}

}  // namespace tessera::internal
