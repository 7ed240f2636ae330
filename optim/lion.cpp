#include "tessera/optim/lion.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sign.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "tessera/optim/adam_update.h"
#include "tessera/trace/trace.h"

namespace tessera {

at::Tensor Lion::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "Lion");
  require_dense_gradients();
  for (const auto& group : param_groups()) {
    const LionOptions& options = options_of(group);
    std::vector<at::Tensor> parameters, gradients, averages;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || parameter.numel() == 0) continue;
      LionParamState& state = state_of(parameter);
      if (!state.exp_avg().defined()) state.exp_avg(at::zeros_like(parameter));
      parameters.push_back(parameter);
      gradients.push_back(laid_out_as(parameter.grad(), parameter));
      averages.push_back(state.exp_avg());
    }
    if (parameters.empty()) continue;
    std::vector<at::Tensor> signs = at::_foreach_mul(averages, options.beta1());
    at::_foreach_add_(signs, gradients, 1 - options.beta1());
    at::_foreach_sign_(signs);
    at::_foreach_mul_(averages, options.beta2());
    at::_foreach_add_(averages, gradients, 1 - options.beta2());
    if (options.weight_decay() != 0) at::_foreach_mul_(parameters, 1 - options.lr() * options.weight_decay());
    at::_foreach_add_(parameters, signs, -options.lr());
  }
  return loss;
}

}  // namespace tessera
