#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera {

// Sets learning rates as a function of the step, for any optimizer (torch.optim.lr_scheduler.LambdaLR). A group's peak
// is its learning rate when the schedule is constructed. If the group is added later, its peak is its rate before the
// schedule first sets it. In step n, counted from 0, the rate is the peak times factor(n).
//
//   tessera::WarmupCosineLR schedule(optimizer, 100, 10'000);   // sets the rate of the first step
//   for (...) { ...; optimizer.step(); schedule.step(); }
//   save_checkpoint(dir, {model, optimizer, schedule});
//
// A checkpoint contains the number of steps, but not the peaks or the factor. A schedule must be constructed before
// load_checkpoint(); otherwise the loaded rates become its peaks. Not collective; must be equal on all ranks.
class LambdaLR : public torch::optim::LRScheduler {
 public:
  // Sets the rates of step 0. The optimizer must outlive the schedule.
  LambdaLR(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> factor);

  // Sets the rates of `step`, for programs that count steps. Throws std::invalid_argument unless 0 <= step < 2^32.
  void set_step(int64_t step);
  int64_t current_step() const { return step_count_; }  // the step whose rates are set

 private:
  std::vector<double> get_lrs() override;
  std::vector<double> rates_of(int64_t step);

  torch::optim::Optimizer& optimizer_;
  std::function<double(int64_t)> factor_;
  std::vector<double> peaks_;  // peak of each group
};

// The rate rises linearly over the first `warmup_steps`, from peak / warmup_steps to the peak, and then is constant.
class WarmupLR : public LambdaLR {
 public:
  // Throws std::invalid_argument unless 0 <= warmup_steps < 2^32.
  WarmupLR(torch::optim::Optimizer& optimizer, int64_t warmup_steps);
};

// The rate rises like that of WarmupLR, then falls by half a cosine: from the peak at step `warmup_steps` to peak *
// final_fraction at the last step, total_steps - 1. If both are one step, it has the peak. Later steps have the rate
// peak * final_fraction. Loshchilov and Hutter, 2017 (https://arxiv.org/abs/1608.03983), without restarts.
class WarmupCosineLR : public LambdaLR {
 public:
  // Throws std::invalid_argument unless 0 <= warmup_steps <= total_steps, total_steps >= 1 and final_fraction >= 0.
  WarmupCosineLR(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps,
                 double final_fraction = 0.0);
};

}  // namespace tessera
