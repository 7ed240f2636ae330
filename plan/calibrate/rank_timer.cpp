#include "plan/calibrate/rank_timer.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "plan/calibrate/calibrate_operators.h"

namespace tessera::internal {

RankTimer::RankTimer(std::shared_ptr<Communicator> comm, const CalibrationOptions& options)
    : comm_(std::move(comm)), options_(options), budget_s_(options.quick ? 0.04 : 0.25) {}

void RankTimer::say(const std::string& what) const {
  if (comm_->rank() == 0 && options_.progress) options_.progress(what);
}

double RankTimer::over_ranks(double seconds, ReduceOp op) const {
  const at::Tensor all = at::tensor({seconds}, at::kDouble);
  comm_->all_reduce(all, op, "calibration").wait();
  return all.item<double>();
}

double RankTimer::once_s(const std::function<void()>& call) const {
  comm_->barrier("calibration");
  const double began_s = wall_clock_s();
  call();
  return wall_clock_s() - began_s;
}

double RankTimer::seconds_of(const std::function<void()>& call) const {
  call();
  const double once = std::max(slowest(once_s(call)), 1e-7);
  const int calls = std::clamp(static_cast<int>(budget_s_ / once), 5, 1000);
  std::vector<double> seconds;
  for (int i = 0; i < calls; ++i) {
    const double began_s = wall_clock_s();
    call();
    seconds.push_back(wall_clock_s() - began_s);
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
