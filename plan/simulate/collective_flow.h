#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera::internal {

// How a collective goes on in core/comm/gloo/gloo_communicator.cpp, where each rank sends to each other one: for times
// of CPUs.
struct CollectiveFlow {
  int exchanges = 1;              // one after the other, each waited for; 2 at most
  double message_bytes[2]{};      // of each exchange, to each other rank
  bool first_is_rooted = false;   // in the first exchange one rank sends to all others
  bool first_is_to_root = false;  // or they to it
  double sum_bytes = 0;           // that come from others in the first exchange, and are added up when it is waited for
  bool only_root_sums = false;

  // Whether a message goes from a rank to another one, of whom one may be the root.
  bool sends(int exchange, bool from_root, bool to_root) const;
};

// Throws std::invalid_argument for an operation that it does not know. A group of two ranks or more.
CollectiveFlow flow_of(const RecordedCollective& collective);

// The group of `rank` that is to it what `members` are to the rank that recorded them: the same one if `rank` is in it,
// else ranks that are as far apart from each other, as groups of a grid are. In the members' order. Throws
// std::invalid_argument if the recorded group is none of a grid's.
std::vector<int> group_of(const RecordedCollective& collective, int rank);

// What a collective takes of a processor within a host, of each rank in the mean: operations to be begun, bytes that
// are copied, bytes that are added up.
struct CollectiveWork {
  double operations = 0, copied_bytes = 0, summed_bytes = 0;

  // LinkSpeed says what of a byte is reduced, which is copied first.
  double seconds(const LinkSpeed& link) const;
};
// Throws as flow_of(). None for a group of one.
CollectiveWork work_of(const RecordedCollective& collective);

// Of LinkSpeed::latency_s, for each exchange: as many as the group's number has bits.
int latencies_of(const RecordedCollective& collective);

// Seconds of a byte that is added up, beside its copy. 0 where that is not known.
double sum_s_per_byte(const LinkSpeed& link);

}  // namespace tessera::internal
