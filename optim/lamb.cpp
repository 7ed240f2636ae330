#include <tessera/optim/lamb.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <stdexcept>

#include "core/model/shard_norm.h"
#include "core/runtime/require.h"
#include "optim/host/adam_update.h"

namespace tessera {
using namespace internal;
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

void check_options(const torch::optim::OptimizerOptions& options) {
  const auto* own = dynamic_cast<const AdamWOptions*>(&options);
  if (own == nullptr) throw std::invalid_argument("Lamb: a group has options of another optimizer");
  if (own->amsgrad()) throw std::invalid_argument("Lamb: amsgrad is true, expected false: LAMB has no such form");
  torch::optim::AdamW(std::vector<at::Tensor>(), *own);  // checks the values
}

void require_steppable(const at::Tensor& parameter) {
  const bool is_trained = parameter.requires_grad();
  require(!is_trained || !parameter.is_meta(), "Lamb: a parameter of shape ", parameter.sizes(),
          " has no values, expected those of materialize() or of a wrapper");
  require(!parameter.grad().defined() || parameter.grad().layout() == at::kStrided, "Lamb: a parameter of shape ",
          parameter.sizes(), " has a sparse gradient");
  require(!is_trained || at::isFloatingType(parameter.scalar_type()), "Lamb: a parameter of shape ", parameter.sizes(),
          " is ", parameter.scalar_type(), ", expected a floating-point type");
}

// Updates the state (m, v, t). Returns m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * parameter.
at::Tensor direction(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const AdamWOptions& options) {
  const at::Tensor& gradient = parameter.grad();
  auto& state =
      adam_state<AdamWParamState>(optimizer, parameter, [](const at::Tensor& p) { return at::zeros_like(p); });
  state.step(state.step() + 1);
  const auto [beta1, beta2] = options.betas();
  state.exp_avg().mul_(beta1).add_(gradient, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const double correction1 = 1 - std::pow(beta1, static_cast<double>(state.step()));
  const double correction2 = 1 - std::pow(beta2, static_cast<double>(state.step()));
  const at::ScalarType dtype = at::toOpMathType(parameter.scalar_type());  // in fp16, eps would be rounded to 0
  at::Tensor result = state.exp_avg().to(dtype).div(correction1);
  result.div_(state.exp_avg_sq().to(dtype).div(correction2).sqrt_().add_(options.eps()));
  if (options.weight_decay() != 0) result.add_(parameter, options.weight_decay());
  return result;
}

}  // namespace

Lamb::Lamb(std::vector<OptimizerParamGroup> groups, AdamWOptions defaults)
    : Optimizer(groups, std::make_unique<AdamWOptions>(defaults)) {
  check();
}

Lamb::Lamb(std::vector<at::Tensor> parameters, AdamWOptions defaults)
    : Lamb({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

Lamb::Lamb(const ModelShards& model, std::vector<OptimizerParamGroup> groups, AdamWOptions defaults)
    : Optimizer(groups, std::make_unique<AdamWOptions>(defaults)), parts_(model) {
  check();
}

void Lamb::check() {
  parts_.require_known(param_groups(), "Lamb");
  list_once(param_groups(), "Lamb");
  check_options(defaults());
  for (const auto& group : param_groups()) check_options(group.options());
  checked_groups_ = param_groups().size();
}

void Lamb::add_param_group(const OptimizerParamGroup& group) {
  add_checked_group(*this, group, [this] { check(); });
}

Lamb::Lamb(const ModelShards& model, AdamWOptions defaults)
    : Lamb(model, {OptimizerParamGroup(model.parameters())}, std::move(defaults)) {}

at::Tensor Lamb::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  if (checked_groups_ != param_groups().size()) check();
  for (const auto& group : param_groups())
    for (const at::Tensor& parameter : group.params()) require_steppable(parameter);
  // The lists contain every parameter, with or without a gradient, so that the lists of all ranks match. No norm is
  // computed for frozen parameters, which may be integers.
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
  auto is_stepped = [&](size_t i) {  // whether any rank may step parameter i
    return directions[i].defined() || (parts_.are_cut() && parameters[i].requires_grad());
  };
  std::vector<at::Tensor> parts;  // this rank's part of each parameter, then of each direction
  for (const auto* list : {&parameters, &directions})
    for (size_t i = 0; i < list->size(); ++i)
      parts.push_back(is_stepped(i) && parts_.counts(parameters[i]) ? (*list)[i] : at::Tensor());
  const std::vector<double> norms = norms_over_ranks(parts, parts_.are_cut() ? parts_.comm() : nullptr);
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
