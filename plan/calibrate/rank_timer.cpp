#include "plan/calibrate/rank_timer.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "plan/calibrate/calibrate_operators.h"

namespace tessera::internal {
namespace {

using TimerClock = std::chrono::steady_clock;

double elapsed_s(TimerClock::time_point begin) {
  return std::chrono::duration<double>(TimerClock::now() - begin).count();
}

}  // namespace

RankTimer::RankTimer(std::shared_ptr<Communicator> comm, const CalibrationOptions& options)
    : comm_(std::move(comm)), options_(options), budget_s_(options.quick ? 0.04 : 0.25) {}

void RankTimer::say(const std::string& what) const {
  if (comm_->rank() == 0 && options_.progress) options_.progress(what);
}

double RankTimer::slowest(double seconds) const {
  const at::Tensor most = at::tensor({seconds}, at::kDouble);
  comm_->all_reduce(most, ReduceOp::kMax, "calibration").wait();
  return most.item<double>();
}

double RankTimer::mean(double seconds) const {
  const at::Tensor all = at::tensor({seconds}, at::kDouble);
  comm_->all_reduce(all, ReduceOp::kAverage, "calibration").wait();
  return all.item<double>();
}

double RankTimer::once_s(const std::function<void()>& call) const {
  comm_->barrier("calibration");
  const auto begin = TimerClock::now();
  call();
  return elapsed_s(begin);
}

double RankTimer::seconds_of(const std::function<void()>& call) const {
  call();
  comm_->barrier("calibration");
  const auto probe = TimerClock::now();
  call();
  const double once = std::max(slowest(elapsed_s(probe)), 1e-7);
  const int calls = std::clamp(static_cast<int>(budget_s_ / once), 5, 1000);
  std::vector<double> seconds;
  for (int i = 0; i < calls; ++i) {
    const auto begin = TimerClock::now();
    call();
    seconds.push_back(elapsed_s(begin));
  }
  return slowest(median_of(std::move(seconds)));
}

double RankTimer::processor_seconds_of(const std::function<void()>& call, double (*clock)()) const {
  const int calls = std::clamp(static_cast<int>(budget_s_ / std::max(seconds_of(call), 1e-7)), 5, 1000);
  comm_->barrier("calibration");
  const double began_s = clock();
  for (int i = 0; i < calls; ++i) call();
  const double taken_s = clock() - began_s;
  comm_->barrier("calibration");
  return mean(taken_s / calls);
}

double RankTimer::work_seconds_of(const std::function<void()>& call) const {
  return by_processor() ? processor_seconds_of(call) : seconds_of(call);
}

}  // namespace tessera::internal
