#include "core/comm/watchdog/wait_graph.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace tessera::internal {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GroupWait, group, ranks, sequence, operation, started)

namespace {

using Json = nlohmann::json;

constexpr size_t kMostNamed = 8;

// A depth-first search for a cycle of waits. Never revisits a wait from which it found no cycle.
class WaitSearch {
 public:
  WaitSearch(int size, const std::function<std::vector<GroupWait>(int rank)>& waits_of)
      : size_(size), waits_of_(waits_of) {}

  // Returns a cycle that contains `wait` of `rank` or is reachable from that wait, or an empty cycle.
  WaitCycle find(int rank, const GroupWait& wait) {
    const auto same = [&](const auto& visited) { return visited.first == rank && visited.second.group == wait.group; };
    const auto begin = std::ranges::find_if(path_, same);
    if (begin != path_.end()) return {begin, path_.end()};
    if (!seen_.emplace(rank, wait.group).second) return {};
    path_.emplace_back(rank, wait);
    for (int i = 0, end = wait.ranks.empty() ? size_ : static_cast<int>(wait.ranks.size()); i < end; ++i) {
      const int other = wait.ranks.empty() ? i : wait.ranks[i];
      for (const GroupWait& theirs : waits_of(other)) {
        const auto started = theirs.started.find(wait.group);
        if (started == theirs.started.end() || started->second > wait.sequence) continue;
        if (auto cycle = find(other, theirs); !cycle.empty()) return cycle;
      }
    }
    path_.pop_back();
    return {};
  }

  const std::vector<GroupWait>& waits_of(int rank) {
    const auto known = known_.find(rank);
    return known != known_.end() ? known->second : known_[rank] = waits_of_(rank);
  }

 private:
  const int size_;
  const std::function<std::vector<GroupWait>(int rank)>& waits_of_;
  std::map<int, std::vector<GroupWait>> known_;
  std::set<std::pair<int, std::string>> seen_;
  WaitCycle path_;
};

}  // namespace

std::string text_of_waits(const std::vector<GroupWait>& waits) {
  return waits.empty() ? "" : Json(waits).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<GroupWait> waits_of_text(const std::string& text) {
  return text.empty() ? std::vector<GroupWait>() : Json::parse(text).get<std::vector<GroupWait>>();
}

std::string wait_text(const GroupWait& wait, int size) {
  return c10::str("operation #", wait.sequence, ", ", wait.operation,
                  wait.ranks.empty() ? c10::str(" in the group of all ", size, " ranks") : "");
}

WaitCycle find_wait_cycle(int rank, int size, const std::function<std::vector<GroupWait>(int rank)>& waits_of) {
  WaitSearch search(size, waits_of);
  const std::vector<GroupWait> own = search.waits_of(rank);
  for (const GroupWait& wait : own)
    if (auto cycle = search.find(rank, wait); !cycle.empty()) return cycle;
  return {};
}

std::string cycle_text(const WaitCycle& cycle, int size) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(cycle.size(), kMostNamed); ++i)
    texts.push_back(c10::str("rank ", cycle[i].first, " in ", wait_text(cycle[i].second, size)));
  if (cycle.size() > kMostNamed) texts.push_back(c10::str(cycle.size() - kMostNamed, " more"));
  return "ranks wait for each other in different groups: " + c10::Join("; ", texts);
}

}  // namespace tessera::internal
