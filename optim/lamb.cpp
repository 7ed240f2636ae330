#include "tessera/optim/lamb.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <stdexcept>

#include "tessera/flat/shard_norm.h"

namespace tessera {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

void check_options(const AdamWOptions& options) {
  if (options.amsgrad()) throw std::invalid_argument("Lamb: amsgrad is true, expected false: LAMB has no such form");
}

std::vector<at::Tensor> tensors_of(const ModelShards& model) {
  std::vector<at::Tensor> tensors;
  for (const NamedShard& shard : model.named_shards()) tensors.push_back(shard.tensor);
  return tensors;
}

// exp_avg / (1 - beta1^t) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps) + weight_decay * parameter
at::Tensor direction(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const AdamWOptions& options) {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.layout() != at::kStrided)
    throw std::invalid_argument("Lamb: a parameter of shape " + c10::str(parameter.sizes()) + " has a sparse gradient");
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<AdamWParamState>();
    fresh->step(0);
    fresh->exp_avg(at::zeros_like(parameter));
    fresh->exp_avg_sq(at::zeros_like(parameter));
    slot = std::move(fresh);
  }
  auto& state = static_cast<AdamWParamState&>(*slot);
  state.step(state.step() + 1);
  const auto [beta1, beta2] = options.betas();
  state.exp_avg().mul_(beta1).add_(gradient, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const double correction1 = 1 - std::pow(beta1, static_cast<double>(state.step()));
  const double correction2 = 1 - std::pow(beta2, static_cast<double>(state.step()));
  at::Tensor result = state.exp_avg().div(correction1);
  result.div_(state.exp_avg_sq().div(correction2).sqrt_().add_(options.eps()));
  if (options.weight_decay() != 0) result.add_(parameter, options.weight_decay());
  return result;
}

}  // namespace

Lamb::Lamb(std::vector<OptimizerParamGroup> groups, AdamWOptions defaults)
    : Optimizer(std::move(groups), std::make_unique<AdamWOptions>(defaults)) {
  check_options(defaults);
  for (auto& group : param_groups()) check_options(static_cast<const AdamWOptions&>(group.options()));
}

Lamb::Lamb(std::vector<at::Tensor> parameters, AdamWOptions defaults)
    : Lamb({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

Lamb::Lamb(const ModelShards& model, std::vector<OptimizerParamGroup> groups, AdamWOptions defaults)
    : Lamb(std::move(groups), std::move(defaults)) {
  comm_ = model.comm();
  std::unordered_set<const c10::TensorImpl*> known;
  for (const NamedShard& shard : model.named_shards()) {
    known.insert(shard.tensor.unsafeGetTensorImpl());
    if (shard.replica == 0) counted_.insert(shard.tensor.unsafeGetTensorImpl());
  }
  for (auto& group : param_groups())
    for (const at::Tensor& parameter : group.params())
      if (!known.contains(parameter.unsafeGetTensorImpl()))
        throw std::invalid_argument("Lamb on rank " + std::to_string(comm_->rank()) + ": a parameter of shape " +
                                    c10::str(parameter.sizes()) + " is none of the wrapper's parameters()");
}

Lamb::Lamb(const ModelShards& model, AdamWOptions defaults)
    : Lamb(model, {OptimizerParamGroup(tensors_of(model))}, std::move(defaults)) {}

at::Tensor Lamb::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode recording(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  // One row for each parameter, with a gradient or not, so that ranks need not agree on that.
  std::vector<at::Tensor> parameters, directions;
  std::vector<double> rates;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      parameters.push_back(parameter);
      directions.push_back(parameter.grad().defined() ? direction(*this, parameter, options) : at::Tensor());
      rates.push_back(options.lr());
    }
  }
  std::vector<at::Tensor> parts;  // each parameter's, then each direction's
  for (const auto* list : {&parameters, &directions})
    for (size_t i = 0; i < list->size(); ++i)
      parts.push_back(comm_ && !counted_.contains(parameters[i].unsafeGetTensorImpl()) ? at::Tensor() : (*list)[i]);
  const std::vector<double> norms = norms_over_ranks(parts, comm_.get());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!directions[i].defined()) continue;
    const double weight = norms[i], step = norms[parameters.size() + i];
    const double trust = weight > 0 && step > 0 ? weight / step : 1.0;
    parameters[i].add_(directions[i], -rates[i] * trust);
  }
  return loss;
}

void Lamb::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

void Lamb::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

}  // namespace tessera
