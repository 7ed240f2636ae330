#include <tessera/optim/lion.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sign.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"

namespace tessera {
using namespace internal;
namespace {

struct LionBatch {
  std::vector<at::Tensor> parameters, gradients, averages;

  void step(const LionOptions& options) const {
    if (parameters.empty()) return;
    std::vector<at::Tensor> signs = at::_foreach_mul(averages, options.beta1());
    at::_foreach_add_(signs, gradients, 1 - options.beta1());
    at::_foreach_sign_(signs);
    // Changes the parameters first. If this fails with a disk error (paged parameters), the momenta are unchanged.
    if (options.weight_decay() != 0) at::_foreach_mul_(parameters, 1 - options.lr() * options.weight_decay());
    at::_foreach_add_(parameters, signs, -options.lr());
    at::_foreach_mul_(averages, options.beta2());
    at::_foreach_add_(averages, gradients, 1 - options.beta2());
  }
};

}  // namespace

at::Tensor Lion::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "Lion");
  require_steppable();
  for (const auto& group : param_groups()) {
    const LionOptions& options = options_of(group);
    LionBatch in_memory;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      if (note_write_if_empty(parameter)) continue;
      LionParamState& state = state_of(parameter);
      if (!state.exp_avg().defined()) state.exp_avg(at::zeros_like(parameter));
      const at::Tensor gradient = laid_out_as(parameter.grad(), parameter);
      if (is_on_disk(parameter)) {
        LionBatch{{parameter}, {gradient}, {state.exp_avg()}}.step(options);
        continue;
      }
      in_memory.parameters.push_back(parameter);
      in_memory.gradients.push_back(gradient);
      in_memory.averages.push_back(state.exp_avg());
    }
    in_memory.step(options);
  }
  return loss;
}

}  // namespace tessera
