#include "plan/report/timeline_data.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace tessera::internal {
namespace {

using nlohmann::json;

constexpr size_t kMostDrawn = 2000;  // maximum number of intervals of a lane
constexpr size_t kMostDifferences = 12;
constexpr size_t kMostStretches = 200;
constexpr double kLargePart = 0.05;  // a difference above this part of the measured step is large

struct DrawnInterval {
  std::string name;
  double begin_s, end_s;
  bool in_backward;
  int operators;
};

// Adds a lane, if it has intervals. Of more than kMostDrawn intervals, draws the longest.
void add_lane(json& lanes, const char* name, std::vector<DrawnInterval> drawn) {
  if (drawn.empty()) return;
  if (drawn.size() > kMostDrawn) {
    std::ranges::sort(drawn, std::ranges::greater{}, [](const auto& each) { return each.end_s - each.begin_s; });
    drawn.resize(kMostDrawn);
    std::ranges::sort(drawn, {}, &DrawnInterval::begin_s);
  }
  json intervals = json::array();
  for (const DrawnInterval& each : drawn)
    intervals.push_back({{"name", each.name},
                         {"begin_ms", each.begin_s * 1e3},
                         {"end_ms", each.end_s * 1e3},
                         {"backward", each.in_backward},
                         {"operators", each.operators}});
  lanes.push_back({{"lane", name}, {"intervals", std::move(intervals)}});
}

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
  return drawn;
}

// The predicted and the measured time of a unit, a collective, the optimizer or waits.
struct BothTimes {
  double predicted_ms = 0, measured_ms = 0;
  double difference() const { return std::abs(predicted_ms - measured_ms); }
};
using TimesByName = std::map<std::string, BothTimes>;

std::string name_of_compute(const std::string& unit, bool in_backward) {
  if (unit.empty() || unit == "forward" || unit == "backward") return in_backward ? "backward" : "forward";
  return in_backward ? unit + ", in backward" : unit;
}

void add_predicted(const StepTime& time, TimesByName& times) {
  double backward_until = 0;
  for (const TimedInterval& each : time.intervals)
    if (each.lane == Lane::kCompute && each.in_backward) backward_until = std::max(backward_until, each.end_s);
  for (const TimedInterval& each : time.intervals) {
    const double ms = (each.end_s - std::max(each.begin_s, 0.0)) * 1e3;
    if (each.lane != Lane::kCompute) {
      times[each.name].predicted_ms += ms;
    } else {
      // Counts compute after backward, including clipping by norm, as optimizer time.
      const bool is_optimizer = !each.in_backward && each.begin_s >= backward_until;
      times[is_optimizer ? "optimizer" : name_of_compute(each.unit, each.in_backward)].predicted_ms += ms;
    }
  }
  times["waits"].predicted_ms = time.exposed_s * 1e3;
}

void add_measured(const MeasuredStep& step, TimesByName& times) {
  using Kind = MeasuredInterval::Kind;
  for (const MeasuredInterval& each : step.intervals) {
    const double begin_s = std::max(each.begin_s, 0.0);
    if (each.kind == Kind::kCollective) times[each.name].measured_ms += (each.end_s - begin_s) * 1e3;
    if (each.kind != Kind::kCompute) continue;
    double seconds = each.end_s - begin_s;
    for (const MeasuredInterval& wait : step.intervals)
      if (wait.kind == Kind::kWait)
        seconds -= std::max(0.0, std::min(wait.end_s, each.end_s) - std::max(wait.begin_s, begin_s));
    times[each.name == "optimizer" ? each.name : name_of_compute(each.name, each.in_backward)].measured_ms +=
        seconds * 1e3;
  }
  times["waits"].measured_ms = step.wait_s * 1e3;
}

json lanes_of_measured(const MeasuredStep& step) {
  constexpr std::pair<MeasuredInterval::Kind, const char*> kLanesOfMeasured[] = {
      {MeasuredInterval::Kind::kCompute, "compute"},
      {MeasuredInterval::Kind::kWait, "waits"},
      {MeasuredInterval::Kind::kCollective, "collectives"}};
  json lanes = json::array();
  for (const auto& [kind, name] : kLanesOfMeasured) {
    std::vector<DrawnInterval> drawn;
    for (const MeasuredInterval& each : step.intervals)
      if (each.kind == kind)
        drawn.push_back(
            {each.name, each.begin_s, each.end_s, each.in_backward, kind == MeasuredInterval::Kind::kCompute ? 1 : 0});
    add_lane(lanes, name, std::move(drawn));
  }
  return lanes;
}

// Returns a text like "gathered 12 predicted, 16 measured; ...", or "" if all kinds of tensors have equal bytes.
std::string difference_of(const BytesByKind& predicted, const BytesByKind& measured) {
  std::string text;
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    const auto which = static_cast<MemoryKind>(kind);
    if (!is_tensors(which) || predicted[which] == measured[which]) continue;
    text += (text.empty() ? "" : "; ") + std::string(name_of(which)) + " " + std::to_string(predicted[which]) +
            " predicted, " + std::to_string(measured[which]) + " measured";
  }
  return text;
}

}  // namespace

json lanes_of(const StepTime& time) {
  json lanes = json::array();
  for (size_t i = 0; i < kLanes; ++i)
    add_lane(lanes, name_of(static_cast<Lane>(i)), joined(time, static_cast<Lane>(i)));
  return lanes;
}

json measured_time_of(const StepTime& predicted, const MeasuredStep& measured) {
  TimesByName times;
  add_predicted(predicted, times);
  add_measured(measured, times);
  std::vector<std::pair<std::string, BothTimes>> all(times.begin(), times.end());
  std::ranges::stable_sort(all, std::ranges::greater{}, [](const auto& one) { return one.second.difference(); });
  json differences = json::array();
  for (const auto& [name, both] : all) {
    if (differences.size() == kMostDifferences) break;
    differences.push_back({{"name", name},
                           {"predicted_ms", both.predicted_ms},
                           {"measured_ms", both.measured_ms},
                           {"is_large", both.difference() > kLargePart * measured.total_s * 1e3}});
  }
  return {{"total_ms", measured.total_s * 1e3},
          {"wait_ms", measured.wait_s * 1e3},
          {"steps", measured.steps},
          {"lanes", lanes_of_measured(measured)},
          {"differences", std::move(differences)}};
}

json measured_memory_of(const RunRecord& predicted, const RunRecord& measured, const std::vector<size_t>& points) {
  json bytes = json::array(), differences = json::array();
  int64_t other_at = -1;
  const size_t count = std::min(predicted.operators.size(), measured.operators.size());
  for (size_t at = 0; at < count; ++at) {
    const RecordedOperator &mine = predicted.operators[at], &theirs = measured.operators[at];
    if (mine.name != theirs.name) {
      other_at = static_cast<int64_t>(at);
      break;
    }
    std::string text = difference_of(mine.live, theirs.live);
    if (text.empty()) continue;
    const bool goes_on = !differences.empty() && differences.back()["end"] == at - 1;
    if (goes_on) {
      differences.back()["end"] = at;
    } else if (differences.size() < kMostStretches) {
      differences.push_back({{"begin", at}, {"end", at}, {"name", mine.name}, {"text", std::move(text)}});
    }
  }
  if (other_at < 0 && predicted.operators.size() != measured.operators.size()) other_at = static_cast<int64_t>(count);
  const size_t until = other_at < 0 ? count : static_cast<size_t>(other_at);
  for (const size_t at : points)
    if (at < until) bytes.push_back({{"at", at}, {"bytes", measured.operators[at].live.tensors()}});
  return {{"peak", measured.peak_bytes()},
          {"points", std::move(bytes)},
          {"differences", std::move(differences)},
          {"other_at", other_at}};
}

}  // namespace tessera::internal
