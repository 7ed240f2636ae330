#include <tessera/optim/lr_schedules.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <utility>

#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

// Limit of LRScheduler, which counts steps in an unsigned int.
constexpr int64_t kMostSteps = std::numeric_limits<unsigned>::max();

void require_steps(const char* name, int64_t steps, int64_t least, int64_t most) {
  require(steps >= least && steps <= most, name, " is ", steps, ", expected ", least, " to ", most);
}

std::function<double(int64_t)> warmup(int64_t warmup_steps) {
  require_steps("warmup_steps", warmup_steps, 0, kMostSteps);
  return [=](int64_t step) {
    return step < warmup_steps ? static_cast<double>(step + 1) / static_cast<double>(warmup_steps) : 1.0;
  };
}

std::function<double(int64_t)> warmup_cosine(int64_t warmup_steps, int64_t total_steps, double final_fraction) {
  require_steps("total_steps", total_steps, 1, kMostSteps);
  require_steps("warmup_steps", warmup_steps, 0, total_steps);
  require(final_fraction >= 0.0 && std::isfinite(final_fraction), "final_fraction is ", final_fraction,
          ", expected a number from 0 on");
  return [=, rise = warmup(warmup_steps)](int64_t step) {
    if (step < warmup_steps) return rise(step);
    if (step >= total_steps) return final_fraction;
    const int64_t decay_steps = total_steps - 1 - warmup_steps;
    const double progress =
        decay_steps > 0 ? static_cast<double>(step - warmup_steps) / static_cast<double>(decay_steps) : 0.0;
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  };
}

}  // namespace

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> factor)
    : LRScheduler(optimizer), optimizer_(optimizer), factor_(std::move(factor)) {
  if (!factor_) throw std::invalid_argument("LambdaLR: the factor is empty, expected a function");
  set_step(0);
}

void LambdaLR::set_step(int64_t step) {
  require_steps("step", step, 0, kMostSteps);
  const std::vector<double> rates = rates_of(step);
  for (size_t i = 0; i < rates.size(); ++i) optimizer_.param_groups()[i].options().set_lr(rates[i]);
  step_count_ = static_cast<unsigned>(step);
}

// Returns the rates of the next step, because libtorch increments step_count_ after calling this function.
std::vector<double> LambdaLR::get_lrs() { return rates_of(int64_t{step_count_} + 1); }

std::vector<double> LambdaLR::rates_of(int64_t step) {
  const std::vector<double> current = get_current_lrs();
  for (size_t i = peaks_.size(); i < current.size(); ++i) peaks_.push_back(current[i]);  // for new groups
  const double factor = factor_(step);
  std::vector<double> rates(current.size());
  for (size_t i = 0; i < rates.size(); ++i) rates[i] = peaks_[i] * factor;
  return rates;
}

WarmupLR::WarmupLR(torch::optim::Optimizer& optimizer, int64_t warmup_steps)
    : LambdaLR(optimizer, warmup(warmup_steps)) {}

WarmupCosineLR::WarmupCosineLR(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps,
                               double final_fraction)
    : LambdaLR(optimizer, warmup_cosine(warmup_steps, total_steps, final_fraction)) {}

}  // namespace tessera
