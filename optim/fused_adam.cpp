#include "tessera/optim/fused_adam.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <string>
#include <vector>

#include "tessera/optim/adam_update.h"
#include "tessera/trace/trace.h"

namespace tessera {
namespace {

constexpr AdamPlace kBesideTheParameter{"a fused optimizer", [](const at::Tensor&) { return std::string(); },
                                        [](const at::Tensor& parameter) { return at::zeros_like(parameter); },
                                        &laid_out_as};

at::Tensor fused_step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "a fused step");
  const std::vector<AdamWork> all = adam_work(optimizer, nullptr, kBesideTheParameter);
  std::vector<AdamUpdate> updates;
  updates.reserve(all.size());
  for (const AdamWork& work : all) updates.push_back(begin_adam_update(optimizer, work, kBesideTheParameter));
  fused_adam_update(updates);
  return loss;
}

}  // namespace

at::Tensor Adam::step(LossClosure closure) { return fused_step(*this, closure); }
at::Tensor AdamW::step(LossClosure closure) { return fused_step(*this, closure); }

}  // namespace tessera
