#include "plan/simulate/step_actions.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace tessera::internal {

std::vector<StepAction> actions_of(const RunRecord& record) {
  using Kind = StepAction::Kind;
  std::vector<std::pair<RecordedWait, size_t>> waits;
  for (size_t i = 0; i < record.collectives.size(); ++i)
    if (record.collectives[i].wait) waits.emplace_back(*record.collectives[i].wait, i);
  std::ranges::sort(waits, {}, [](const auto& each) {
    return std::tuple(each.first.operators, each.first.collectives, each.second);
  });
  std::vector<StepAction> actions;
  size_t start = 0, wait = 0;
  for (size_t i = 0; i <= record.operators.size(); ++i) {
    while (true) {  // adds the starts and waits between the first `i` operators and the next operator
      const bool waits_now = wait < waits.size() && waits[wait].first.operators <= i;
      const bool starts_now = start < record.collectives.size() && record.collectives[start].operators <= i;
      if (waits_now && (!starts_now || waits[wait].first.collectives <= start)) {
        const auto& [at, collective] = waits[wait++];
        actions.push_back({Kind::kWait, collective, at.step});
      } else if (starts_now) {
        actions.push_back({Kind::kStart, start, record.collectives[start].step});
        ++start;
      } else {
        break;
      }
    }
    if (i < record.operators.size()) actions.push_back({Kind::kCompute, i, record.operators[i].step});
  }
  return actions;
}

}  // namespace tessera::internal
