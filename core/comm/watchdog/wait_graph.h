#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

// A long wait of one rank in one of its groups: the group of all ranks, or a group that was split from that group.
// Ranks are numbered as in the group of all ranks.
struct GroupWait {
  std::string group;       // name of the group, equal on all of its ranks
  std::vector<int> ranks;  // members of the group; empty for all ranks
  uint64_t sequence = 0;   // number of the awaited operation
  std::string operation;
  // Number of operations that the waiting thread has started in each group, by name. Contains only groups in which this
  // thread starts all operations, so the numbers do not grow during the wait.
  std::map<std::string, uint64_t> started;

  bool operator==(const GroupWait&) const = default;
};

// Encodes the waits of a rank as a text for the store.
std::string text_of_waits(const std::vector<GroupWait>& waits);
std::vector<GroupWait> waits_of_text(const std::string& text);  // returns an empty list for ""

// Returns for example "operation #3, all-reduce of the loss in the group of ranks 0, 1 of 4". `operation` names the
// group, unless it is the group of all ranks.
std::string wait_text(const GroupWait& wait, int size);

// A cycle in which each rank waits for the next rank, and the last rank waits for the first.
using WaitCycle = std::vector<std::pair<int, GroupWait>>;

// Returns a deadlock that includes `rank`, or for which `rank` waits directly or through other ranks; empty if there is
// none. In a deadlock, each rank waits in a group in which the next rank has not started the awaited operation. A wait
// ends when all ranks of the group have started the operation, so ranks of several groups must wait in one order. (In
// terms of databases, the deadlock is a cycle in a wait-for graph of the AND model.)
//
// Ranks publish their waits at different times. This causes no false cycle, because `started` only grows, and no rank
// of a cycle can proceed before another rank of the cycle.
WaitCycle find_wait_cycle(int rank, int size, const std::function<std::vector<GroupWait>(int rank)>& waits_of);
std::string cycle_text(const WaitCycle& cycle, int size);

}  // namespace tessera::internal
