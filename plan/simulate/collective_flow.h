#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera::internal {

// The messages of a collective in core/comm/gloo/gloo_communicator.cpp, where each rank sends to each other one. Used
// to predict times on CPUs.
struct CollectiveFlow {
  int exchanges = 1;              // sequential, each with a wait; at most 2
  double message_bytes[2]{};      // of each exchange, to each other rank
  bool first_is_rooted = false;   // in the first exchange one rank sends to all others
  bool first_is_to_root = false;  // or receives from them
  double sum_bytes = 0;           // bytes received in the first exchange that the wait adds up
  bool only_root_sums = false;

  // Returns whether a message is sent between two ranks, one of which may be the root.
  bool sends(int exchange, bool from_root, bool to_root) const;
};

// Throws std::invalid_argument for an unknown operation. The group must have two ranks or more.
CollectiveFlow flow_of(const RecordedCollective& collective);

// Returns the group of `rank` that corresponds to the recorded `members`, in their order: the recorded group if `rank`
// is in it. Otherwise the recorded group must be a row or column of a grid, and the result is the one with `rank`.
// Throws std::invalid_argument if it is not.
std::vector<int> group_of(const RecordedCollective& collective, int rank);

// The mean work of a collective on a processor, for each rank within a host: operations started, bytes copied, bytes
// added up.
struct CollectiveWork {
  double operations = 0, copied_bytes = 0, summed_bytes = 0;

  // LinkSpeed's time of a reduced byte includes its copy.
  double seconds(const LinkSpeed& link) const;
};
// Throws like flow_of(). Zero for a group of one.
CollectiveWork work_of(const RecordedCollective& collective);

// Number of LinkSpeed::latency_s in each exchange: log2 of the group's size, rounded up.
int latencies_of(const RecordedCollective& collective);

// Seconds to add up a byte, without its copy; 0 if unknown.
double sum_s_per_byte(const LinkSpeed& link);

}  // namespace tessera::internal
