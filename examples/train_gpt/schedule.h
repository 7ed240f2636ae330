#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace train_gpt {

// The learning rate over a run: it rises linearly over the first `warmup` steps to `peak`, then
// falls along half a cosine to a tenth of it at the last step. Or it is `peak` in all, for optimizers that warm up
// themselves and need no end.
struct Schedule {
  static constexpr double kFinalFraction = 0.1;

  double peak = 0.0;
  int64_t warmup = 0;  // at most steps
  int64_t steps = 1;
  bool is_constant = false;

  // For step 0 to steps - 1. The first step of a warm-up has peak / warmup, not 0.
  double at(int64_t step) const {
    if (is_constant) return peak;
    if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
    const int64_t decay_steps = steps - 1 - warmup;
    const double progress =
        decay_steps > 0 ? static_cast<double>(step - warmup) / static_cast<double>(decay_steps) : 0.0;
    const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    return peak * (kFinalFraction + (1.0 - kFinalFraction) * cosine);
  }
};

}  // namespace train_gpt
