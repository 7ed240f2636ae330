#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

// A long wait of one rank in one of its groups: the group of all ranks, or one that was split from it. Ranks are
// numbered as in the group of all ranks.
struct GroupWait {
  std::string group;       // its name, equal on all of its ranks
  std::vector<int> ranks;  // of the group; empty: all
  uint64_t sequence = 0;   // of the awaited operation
  std::string operation;
  // For each group, by name, in which the waiting thread starts all operations: the number of operations that it has
  // started. The number does not grow during the wait.
  std::map<std::string, uint64_t> started;

  bool operator==(const GroupWait&) const = default;
};

// Encodes a rank's waits for the store.
std::string text_of_waits(const std::vector<GroupWait>& waits);
std::vector<GroupWait> waits_of_text(const std::string& text);  // of "": none

// "operation #3, all-reduce of the loss in the group of ranks 0, 1 of 4". `operation` names the group, unless it is the
// group of all ranks.
std::string wait_text(const GroupWait& wait, int size);

// A cycle: each rank waits for the next one, and the last for the first.
using WaitCycle = std::vector<std::pair<int, GroupWait>>;

// Returns a deadlock among `size` ranks that `rank` waits for, or an empty cycle. In a deadlock, each rank waits in a
// group in which the next rank has not started the awaited operation. A wait ends when all ranks of the group have
// started the operation; ranks of several groups must wait in one order. (This is a cycle in the wait-for graph, as in
// deadlock detection of distributed databases, where a process waits for all of its requests.)
//
// Ranks publish their waits at different times. This gives no false cycle: `started` only grows, and no rank of a cycle
// can move on before another rank of it.
WaitCycle find_wait_cycle(int rank, int size, const std::function<std::vector<GroupWait>(int rank)>& waits_of);
std::string cycle_text(const WaitCycle& cycle, int size);

}  // namespace tessera::internal
