#include <tessera/optim/schedule_free.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"

namespace tessera {
using namespace internal;

void ScheduleFreeOptions::check() const {
  require_option(beta1() > 0 && beta1() < 1, kName, "beta1", beta1(), "above 0 and below 1");
  ListedBetas::check();
  require_option(eps() >= 0, kName, "eps", eps(), "0 or more");
  require_option(warmup_steps() >= 0, kName, "warmup_steps", static_cast<double>(warmup_steps()), "0 or more");
  require_option(std::isfinite(r()), kName, "r", r(), "a finite number");
  require_option(std::isfinite(weight_lr_power()), kName, "weight_lr_power", weight_lr_power(), "a finite number");
}

at::Tensor ScheduleFreeAdamW::step(LossClosure closure) {
  if (is_swapped_in_) throw std::logic_error("ScheduleFreeAdamW::step() while the averages are swapped in");
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "ScheduleFreeAdamW");
  require_steppable();
  for (const auto& group : param_groups()) {
    const ScheduleFreeOptions& options = options_of(group);
    for (const at::Tensor& y : group.params()) {
      if (!y.grad().defined()) continue;
      ScheduleFreeParamState& state = state_of(y);
      if (!state.z().defined()) {
        state.z(y.detach().clone());
        state.exp_avg_sq(at::zeros_like(y));
      }
      const auto k = static_cast<double>(state.step());
      state.step(state.step() + 1);
      const auto warmup = static_cast<double>(options.warmup_steps());
      const double scheduled = k < warmup ? (k + 1) / warmup : 1.0;
      const double lr = options.lr() * scheduled * std::sqrt(1 - std::pow(options.beta2(), k + 1));
      state.lr_max(std::max(lr, state.lr_max()));
      double weight = std::pow(k + 1, options.r()) * std::pow(state.lr_max(), options.weight_lr_power());
      if (!std::isfinite(weight)) weight = 0;  // lr_max is 0, and its power negative
      state.weight_sum(state.weight_sum() + weight);
      // The weight of this step's z in the average.
      const double share = state.weight_sum() > 0 ? weight / state.weight_sum() : 0;
      if (note_write_if_empty(y)) continue;

      const at::Tensor gradient = laid_out_as(y.grad(), y);
      state.exp_avg_sq().mul_(options.beta2()).addcmul_(gradient, gradient, 1 - options.beta2());
      const at::Tensor squares = state.exp_avg_sq().to(at::toOpMathType(y.scalar_type()));  // in fp16, eps would be 0
      at::Tensor direction = gradient / squares.sqrt().add_(options.eps());
      if (options.weight_decay() != 0) direction.add_(y, options.weight_decay());
      // Updates y for the new z and the new average. The average is not stored, because y and z determine it. Where y
      // equals z, as in the first step, lerp_() changes no bit.
      y.lerp_(state.z(), share).add_(direction, lr * (options.beta1() * (1 - share) - 1));
      state.z().add_(direction, -lr);
    }
  }
  return loss;
}

// Computes the averages from the invariant y = beta1 * average + (1 - beta1) * z.
ScopeExit ScheduleFreeAdamW::swap_in_averages() {
  if (is_swapped_in_) throw std::logic_error("ScheduleFreeAdamW::swap_in_averages() while the averages are swapped in");
  at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> own;
  for (const auto& group : param_groups())
    for (const at::Tensor& y : group.params())  // a parameter without a state was stepped by no rank
      if (state().find(y.unsafeGetTensorImpl()) != state().end()) own.emplace_back(y, y.detach().clone());
  is_swapped_in_ = true;
  ScopeExit scope([this, own] {
    at::NoGradGuard quiet;
    for (const auto& [y, value] : own)
      if (!note_write_if_empty(y)) y.detach().copy_(value);
    is_swapped_in_ = false;
  });
  for (const auto& group : param_groups()) {
    for (const at::Tensor& y : group.params()) {
      const auto found = state().find(y.unsafeGetTensorImpl());
      // If this rank has no element of the parameter, only counts a write, because ranks compare their counts.
      if (found == state().end() || note_write_if_empty(y)) continue;
      const at::Tensor& z = static_cast<ScheduleFreeParamState&>(*found->second).z();
      y.lerp_(z.to(y.device()), 1 - 1 / options_of(group).beta1());
    }
  }
  return scope;
}

}  // namespace tessera
