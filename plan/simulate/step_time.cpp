#include <tessera/plan/step_time.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "plan/simulate/shared_cores.h"
#include "plan/simulate/step_actions.h"

namespace tessera {
using namespace internal;
namespace {

class Simulation {
 public:
  Simulation(const RunRecord& record, const MachineSpeed& speed, int step)
      : record_(record), speed_(speed), step_(step), ends_(record.collectives.size(), 0) {}

  StepTime run() {
    for (const StepAction& action : actions_of(record_)) {
      if (action.step < 1 || action.step > step_) continue;
      enter(action.step);
      switch (action.kind) {
        case StepAction::Kind::kCompute:
          compute(record_.operators[action.index]);
          break;
        case StepAction::Kind::kStart:
          start(action.index);
          break;
        case StepAction::Kind::kWait:
          now_ = std::max(now_, ends_[action.index]);
          break;
      }
    }
    enter(step_);  // begins a step that has no actions; otherwise a no-op
    result_.total_s = now_ - began_;
    result_.exposed_s = result_.total_s - result_.compute_s;
    result_.processor_s = result_.compute_s;
    for (TimedInterval& interval : result_.intervals) interval.begin_s -= began_, interval.end_s -= began_;
    std::erase_if(result_.intervals, [](const TimedInterval& interval) { return interval.end_s <= 0; });
    std::ranges::stable_sort(result_.intervals, {},
                             [](const TimedInterval& each) { return std::pair(each.lane, each.begin_s); });
    return std::move(result_);
  }

 private:
  // At the first action of the predicted step, records the start time of the step.
  void enter(int step) {
    if (step != step_ || has_begun_) return;
    has_begun_ = true;
    began_ = now_;
  }

  void start(size_t index) {
    const RecordedCollective& collective = record_.collectives[index];
    const CollectiveTime time = time_of(collective, speed_);
    double& within = free_at_[static_cast<size_t>(Lane::kWithinHost)];
    double& between = free_at_[static_cast<size_t>(Lane::kBetweenHosts)];
    const double begin = std::max({now_, time.within_host ? within : 0.0, time.between_hosts ? between : 0.0});
    const double end = ends_[index] = begin + time.seconds;
    const std::string name = collective.operation + (collective.what.empty() ? "" : " of " + collective.what);
    if (time.within_host) within = end, add(name, Lane::kWithinHost, begin, end);
    if (time.between_hosts) between = end, add(name, Lane::kBetweenHosts, begin, end);
    if (end > begin) busy_.emplace_back(begin, end);
    if (collective.step == step_) result_.communication_s += time.seconds;
  }

  void compute(const RecordedOperator& op) {
    const double begin = now_;
    advance(speed_.seconds_of(op));
    if (op.step != step_) return;
    result_.compute_s += now_ - begin;
    const size_t unit = static_cast<size_t>(op.unit);
    result_.intervals.push_back(
        {op.name, Lane::kCompute, begin, now_, unit < record_.units.size() ? record_.units[unit] : "", op.in_backward});
  }

  // Advances time by `work_s` seconds of compute, or by more if communication slows the compute down.
  void advance(double work_s) {
    std::erase_if(busy_, [&](const auto& interval) { return interval.second <= now_; });
    while (work_s > 0) {
      double change = std::numeric_limits<double>::infinity();
      bool is_busy = false;
      for (const auto& [begin, end] : busy_) {
        is_busy = is_busy || (begin <= now_ && now_ < end);
        if (begin > now_) change = std::min(change, begin);
        if (end > now_) change = std::min(change, end);
      }
      const double rate = is_busy ? 1 - speed_.lost_to_communication : 1;
      if (work_s <= rate * (change - now_)) {
        now_ += work_s / rate;
        return;
      }
      work_s -= rate * (change - now_);
      now_ = change;
    }
  }

  void add(std::string name, Lane lane, double begin, double end) {
    result_.intervals.push_back({std::move(name), lane, begin, end});
  }

  const RunRecord& record_;
  const MachineSpeed& speed_;
  const int step_;
  std::vector<double> ends_;  // end time of each collective that has started; 0 for those of the constructor
  double now_ = 0;            // current time of the compute lane
  double began_ = 0;
  bool has_begun_ = false;
  std::array<double, kLanes> free_at_{};
  std::vector<std::pair<double, double>> busy_;  // begin and end times of collectives that may still be in flight
  StepTime result_;
};

StepTime predicted(const std::vector<const RunRecord*>& of_ranks, const MachineSpeed& speed, int step) {
  const RunRecord& record = *of_ranks.front();
  int last = 0;
  for (const RecordedOperator& op : record.operators) last = std::max(last, op.step);
  for (const RecordedCollective& collective : record.collectives) last = std::max(last, collective.step);
  if (step < 0 || step > last || last == 0)
    throw std::invalid_argument("the time of step " + std::to_string(step) + " of a record of " + std::to_string(last) +
                                " steps, expected one of them, or 0 for the last");
  speed.check();
  if (step == 0) step = last;
  return speed.cores > 0 ? predict_on_cores(of_ranks, speed, step) : Simulation(record, speed, step).run();
}

}  // namespace

const char* name_of(Lane lane) {
  static constexpr std::array<const char*, kLanes> kNames = {"compute", "within host", "between hosts"};
  return kNames[static_cast<size_t>(lane)];
}

StepTime predict_step(const RunRecord& record, const MachineSpeed& speed, int step) {
  return predicted({&record}, speed, step);
}

StepTime predict_step(const std::vector<RunRecord>& of_ranks, const MachineSpeed& speed, int step) {
  if (of_ranks.empty()) throw std::invalid_argument("the time of a step of no record");
  std::vector<const RunRecord*> records;
  for (const RunRecord& record : of_ranks) records.push_back(&record);
  return predicted(records, speed, step);
}

}  // namespace tessera
