#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera::internal {

// The messages of a collective in core/comm/gloo/gloo_communicator.cpp, which sends directly from each rank to each
// other rank. Used to predict times on CPUs.
struct CollectiveFlow {
  int exchanges = 1;              // sequential exchanges, each with a wait; 1 or 2
  double message_bytes[2]{};      // bytes of each message, by exchange
  bool first_is_rooted = false;   // in the first exchange, one rank sends to all others
  bool first_is_to_root = false;  // in the first exchange, one rank receives from all others
  double sum_bytes = 0;           // received bytes that a rank adds up in the first wait
  bool only_root_sums = false;

  // Returns whether a rank (the root if `from_root`) sends a message to another rank (the root if `to_root`).
  bool sends(int exchange, bool from_root, bool to_root) const;
};

// Throws std::invalid_argument for an unknown operation. The group must have two ranks or more.
CollectiveFlow flow_of(const RecordedCollective& collective);

// Returns the group in which `rank` runs the collective, in the order of the recorded `members`. If `rank` is in the
// recorded group, returns that group. Otherwise the group must be a row or column of a grid: returns the row or column
// that has `rank`. Throws std::invalid_argument for other groups.
std::vector<int> group_of(const RecordedCollective& collective, int rank);

// The work of the processor for a collective within a host: started operations, copied bytes, and bytes added up. Each
// is a mean over the ranks.
struct CollectiveWork {
  double operations = 0, copied_bytes = 0, summed_bytes = 0;

  // Returns the processor seconds of the work. LinkSpeed's time of a reduced byte includes the copy of the byte.
  double seconds(const LinkSpeed& link) const;
};
// Returns zeros for a group of one rank. Throws like flow_of().
CollectiveWork work_of(const RecordedCollective& collective);

// Returns the number of LinkSpeed::latency_s in each exchange: log2 of the group's size, rounded up.
int latencies_of(const RecordedCollective& collective);

// Returns the seconds to add up a byte, without its copy; 0 if a speed is unknown.
double sum_s_per_byte(const LinkSpeed& link);

}  // namespace tessera::internal
