#include "plan/simulate/time_lanes.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {
namespace {

struct DrawnInterval {
  std::string name;
  double begin_s, end_s;
  bool in_backward;
  int operators;
};

std::vector<DrawnInterval> joined(const StepTime& time, Lane lane) {
  std::vector<DrawnInterval> drawn;
  for (const TimedInterval& each : time.intervals) {
    if (each.lane != lane) continue;
    const bool computes = lane == Lane::kCompute;
    const std::string name = !computes ? each.name : each.unit.empty() ? "outside of units" : each.unit;
    const bool goes_on = computes && !drawn.empty() && drawn.back().name == name &&
                         drawn.back().in_backward == each.in_backward && drawn.back().end_s == each.begin_s;
    if (goes_on) {
      drawn.back().end_s = each.end_s;
      ++drawn.back().operators;
    } else {
      drawn.push_back({name, each.begin_s, each.end_s, each.in_backward, computes ? 1 : 0});
    }
  }
  if (drawn.size() <= kMostDrawn) return drawn;
  std::ranges::sort(drawn, std::ranges::greater{}, [](const auto& each) { return each.end_s - each.begin_s; });
  drawn.resize(kMostDrawn);
  std::ranges::sort(drawn, {}, &DrawnInterval::begin_s);
  return drawn;
}

}  // namespace

nlohmann::json lanes_of(const StepTime& time) {
  auto lanes = nlohmann::json::array();
  for (size_t i = 0; i < kLanes; ++i) {
    auto intervals = nlohmann::json::array();
    for (const DrawnInterval& each : joined(time, static_cast<Lane>(i)))
      intervals.push_back({{"name", each.name},
                           {"begin_ms", each.begin_s * 1e3},
                           {"end_ms", each.end_s * 1e3},
                           {"backward", each.in_backward},
                           {"operators", each.operators}});
    if (!intervals.empty())
      lanes.push_back({{"lane", name_of(static_cast<Lane>(i))}, {"intervals", std::move(intervals)}});
  }
  return lanes;
}

}  // namespace tessera::internal
