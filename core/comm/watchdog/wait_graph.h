#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

// A wait of one rank that takes long, of the groups that it is in: that of all ranks and those that were split from it.
// Ranks are numbered as in the group of all.
struct GroupWait {
  std::string group;       // its name, the same on all of its ranks
  std::vector<int> ranks;  // which these are; none: all
  uint64_t sequence = 0;   // of the operation that is waited for
  std::string operation;
  // By name, of the groups in which the waiting thread has started all that was: how many operations these are. They
  // will be no more until the wait ends.
  std::map<std::string, uint64_t> started;

  bool operator==(const GroupWait&) const = default;
};

// As a rank leaves its waits in the store.
std::string text_of_waits(const std::vector<GroupWait>& waits);
std::vector<GroupWait> waits_of_text(const std::string& text);  // of "": none

// "operation #3, all-reduce of the loss in the group of ranks 0, 1 of 4": `operation` says so but for the group of all.
std::string wait_text(const GroupWait& wait, int size);

// Ranks, each in a wait for the next one, and the last one in a wait for the first.
using WaitCycle = std::vector<std::pair<int, GroupWait>>;

// Of `size` ranks those that will wait for each other for ever, each in a group in which the next has not started what
// it waits for; none if `rank` waits for none of these. It waits for an operation until all ranks of the group have
// started that, as it is among the rules that ranks of several groups wait in all of them in one order. (A cycle in the
// wait-for graph of deadlock detection in distributed databases, whose processes wait for all that they ask for.) Ranks
// may have said of their waits at different times: started() only grows, so that one that had moved on since would have
// needed another one of the cycle to have done so before.
WaitCycle find_wait_cycle(int rank, int size, const std::function<std::vector<GroupWait>(int rank)>& waits_of);
std::string cycle_text(const WaitCycle& cycle, int size);

}  // namespace tessera::internal
