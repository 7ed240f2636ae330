#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera::internal {

// The messages of a collective in core/comm/gloo/gloo_collectives.cpp. In an exchange, each rank may send a message to
// each other rank. Used to predict times on CPUs.
struct CollectiveFlow {
  int exchanges = 1;              // number of sequential exchanges (1 or 2), each of which ends with a wait
  double message_bytes[2]{};      // size of each message in the first and in the second exchange
  bool first_is_rooted = false;   // whether only the root sends in the first exchange
  bool first_is_to_root = false;  // whether only the root receives in the first exchange
  double sum_bytes = 0;           // received bytes that a rank adds up in the first wait
  bool only_root_sums = false;

  // Returns whether a rank (the root if `from_root`) sends to a peer (the root if `to_root`) in exchange 0 or 1.
  bool sends(int exchange, bool from_root, bool to_root) const;
};

// Returns the messages of a collective of 2 or more ranks. Throws std::invalid_argument if its operation is unknown.
CollectiveFlow flow_of(const RecordedCollective& collective);

// Returns the group in which `rank` runs the collective, in the order of the recorded `members`. If `rank` is in the
// recorded group, returns the recorded group. Otherwise, the recorded group must be a row or column of a grid, and
// the result is the row or column that contains `rank`. Throws std::invalid_argument for other groups.
std::vector<int> group_of(const RecordedCollective& collective, int rank);

// The processor's work for a collective within a host: link latencies, copied bytes and summed bytes. The numbers
// are means over the ranks.
struct CollectiveWork {
  double operations = 0, copied_bytes = 0, summed_bytes = 0;

  // Returns the processor time of the work. A summed byte takes sum_s_per_byte(), which excludes the copy of the byte.
  double seconds(const LinkSpeed& link) const;
};
// Returns the work of a recorded collective, which is zero for a group of one rank. Throws like flow_of().
CollectiveWork work_of(const RecordedCollective& collective);

// Returns the number of link latencies that an exchange takes: log2 of the group's size, rounded up.
int latencies_of(const RecordedCollective& collective);

// Returns the time in seconds to add up one byte, without the time to copy it; 0 if a speed is unknown.
double sum_s_per_byte(const LinkSpeed& link);

}  // namespace tessera::internal
