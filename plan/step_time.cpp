#include "tessera/plan/step_time.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

struct Wait {
  RecordedWait at;
  size_t collective;
};

// Every lane's time, moved forward by what the rank did.
class Simulation {
 public:
  Simulation(const RunRecord& record, const MachineSpeed& speed, int step)
      : record_(record), speed_(speed), step_(step), ends_(record.collectives.size(), 0) {
    for (size_t i = 0; i < record.collectives.size(); ++i)
      if (record.collectives[i].wait) waits_.push_back({*record.collectives[i].wait, i});
    std::ranges::sort(waits_, [](const Wait& a, const Wait& b) {
      return std::pair(a.at.operators, a.at.collectives) < std::pair(b.at.operators, b.at.collectives);
    });
  }

  StepTime run() {
    for (size_t i = 0; i < record_.operators.size(); ++i) {
      exchange_before(i);
      if (record_.operators[i].step >= 1 && record_.operators[i].step <= step_) compute(record_.operators[i]);
    }
    exchange_before(record_.operators.size());
    enter(step_);  // a step in which nothing happens
    result_.total_s = now_ - began_;
    result_.exposed_s = result_.total_s - result_.compute_s;
    for (TimedInterval& interval : result_.intervals) interval.begin_s -= began_, interval.end_s -= began_;
    std::erase_if(result_.intervals, [](const TimedInterval& interval) { return interval.end_s <= 0; });
    std::ranges::stable_sort(result_.intervals, {},
                             [](const TimedInterval& each) { return std::pair(each.lane, each.begin_s); });
    return std::move(result_);
  }

 private:
  // The first thing of the step that is asked for begins it.
  void enter(int step) {
    if (step != step_ || has_begun_) return;
    has_begun_ = true;
    began_ = now_;
  }

  // Starts and waits after `operators` operators and before the next one, in their order.
  void exchange_before(size_t operators) {
    const auto& starts = record_.collectives;
    while (true) {
      const bool waits = wait_ < waits_.size() && waits_[wait_].at.operators <= operators;
      const bool starts_one = start_ < starts.size() && starts[start_].operators <= operators;
      if (waits && (!starts_one || waits_[wait_].at.collectives <= start_)) {
        wait(waits_[wait_++]);
      } else if (starts_one) {
        start(start_++);
      } else {
        return;
      }
    }
  }

  void start(size_t index) {
    const RecordedCollective& collective = record_.collectives[index];
    if (collective.step < 1 || collective.step > step_) return;
    enter(collective.step);
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

  void wait(const Wait& wait) {
    if (wait.at.step < 1 || wait.at.step > step_) return;
    enter(wait.at.step);
    now_ = std::max(now_, ends_[wait.collective]);
  }

  void compute(const RecordedOperator& op) {
    enter(op.step);
    const double begin = now_;
    advance(speed_.seconds_of(op));
    if (op.step != step_) return;
    result_.compute_s += now_ - begin;
    const size_t unit = static_cast<size_t>(op.unit);
    result_.intervals.push_back(
        {op.name, Lane::kCompute, begin, now_, unit < record_.units.size() ? record_.units[unit] : "", op.in_backward});
  }

  // Work of so many seconds, of which less is done while something is communicated.
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
  std::vector<Wait> waits_;      // in their order
  std::vector<double> ends_;     // by collective; 0: over before the first step
  size_t start_ = 0, wait_ = 0;  // the next of each
  double now_ = 0;               // of compute
  double began_ = 0;
  bool has_begun_ = false;
  std::array<double, kLanes> free_at_{};
  std::vector<std::pair<double, double>> busy_;  // communication that may not be over
  StepTime result_;
};

}  // namespace

const char* name_of(Lane lane) {
  static constexpr std::array<const char*, kLanes> kNames = {"compute", "within host", "between hosts"};
  return kNames[static_cast<size_t>(lane)];
}

StepTime predict_step(const RunRecord& record, const MachineSpeed& speed, int step) {
  int last = 0;
  for (const RecordedOperator& op : record.operators) last = std::max(last, op.step);
  for (const RecordedCollective& collective : record.collectives) last = std::max(last, collective.step);
  if (step < 0 || step > last || last == 0)
    throw std::invalid_argument("the time of step " + std::to_string(step) + " of a record of " + std::to_string(last) +
                                " steps, expected one of them, or 0 for the last");
  speed.check();
  return Simulation(record, speed, step == 0 ? last : step).run();
}

}  // namespace tessera
