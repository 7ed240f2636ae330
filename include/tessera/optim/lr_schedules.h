#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera {

// Learning rates as a function of the step, for any optimizer: torch.optim.lr_scheduler.LambdaLR. Each group has its
// own peak: its learning rate when the schedule is constructed. A step uses the peak times factor(step); step 0 is the
// first.
//
//   tessera::WarmupCosineLR schedule(optimizer, 100, 10'000);   // sets the rate of the first step
//   for (...) { ...; optimizer.step(); schedule.step(); }
//   save_checkpoint(dir, {model, optimizer, schedule});
//
// A checkpoint has the number of steps. Peaks and factors are the constructor's. Construct it before load_checkpoint():
// otherwise a loaded rate becomes the peak. Not collective; must be equal on all ranks.
class LambdaLR : public torch::optim::LRScheduler {
 public:
  // Sets the rates of step 0. The optimizer must outlive the schedule.
  LambdaLR(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> factor);

  // Sets the rates of a step, for programs that count steps themselves. Throws std::invalid_argument below 0.
  void set_step(int64_t step);
  int64_t current_step() const { return step_count_; }  // calls of step(), or the last set_step()

 private:
  std::vector<double> get_lrs() override;
  std::vector<double> rates_of(int64_t step);

  torch::optim::Optimizer& optimizer_;
  std::function<double(int64_t)> factor_;
  std::vector<double> peaks_;  // of the groups
};

// The rate rises linearly over the first `warmup_steps`, from peak / warmup_steps, and then is constant.
class WarmupLR : public LambdaLR {
 public:
  // Throws std::invalid_argument for steps below 0.
  WarmupLR(torch::optim::Optimizer& optimizer, int64_t warmup_steps);
};

// WarmupLR, then half a cosine: from the peak at step `warmup_steps` to peak * final_fraction at the last step,
// total_steps - 1. Steps after the last keep its rate. Loshchilov and Hutter, 2017 (https://arxiv.org/abs/1608.03983),
// without restarts.
class WarmupCosineLR : public LambdaLR {
 public:
  // Throws std::invalid_argument for warmup_steps below 0 or above total_steps, and for total_steps below 1.
  WarmupCosineLR(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps,
                 double final_fraction = 0.0);
};

}  // namespace tessera
