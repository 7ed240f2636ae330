#include "tessera/optim/adam_update.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace tessera {
namespace {

template <class Options>
AdamRule rule_of(const Options& options, bool is_decoupled) {
  return {options.lr(),  std::get<0>(options.betas()), std::get<1>(options.betas()),
          options.eps(), options.weight_decay(),       options.amsgrad(),
          is_decoupled};
}

AdamRule rule_of(const torch::optim::OptimizerOptions& options) {
  if (const auto* decoupled = dynamic_cast<const torch::optim::AdamWOptions*>(&options))
    return rule_of(*decoupled, true);
  return rule_of(dynamic_cast<const torch::optim::AdamOptions&>(options), false);
}

// In words after the parameter's shape; "" if it can be stepped.
std::string problem_of(const at::Tensor& parameter, const AdamPlace& place) {
  if (std::string problem = place.problem(parameter); !problem.empty()) return problem;
  if (!at::isFloatingType(parameter.scalar_type()))
    return c10::str("is ", parameter.scalar_type(), ", expected a floating-point type");
  if (parameter.grad().layout() != at::kStrided)
    return c10::str("has a gradient of layout ", parameter.grad().layout(), ", expected a dense one");
  if (!parameter.is_non_overlapping_and_dense())
    return c10::str("has strides ", parameter.strides(), ", expected dense ones");
  return "";
}

void check(const at::Tensor& parameter, const AdamPlace& place) {
  const std::string problem = problem_of(parameter, place);
  if (!problem.empty())
    throw std::invalid_argument(std::string(place.name) + ": a parameter of shape " + c10::str(parameter.sizes()) +
                                " " + problem);
}

template <class State>
AdamUpdate begin(torch::optim::Optimizer& optimizer, const AdamWork& work, const AdamPlace& place) {
  const at::Tensor& parameter = work.parameter;
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(place.zeros(parameter));
    fresh->exp_avg_sq(place.zeros(parameter));
    slot = std::move(fresh);
  }
  auto& state = static_cast<State&>(*slot);
  state.exp_avg(place.placed(state.exp_avg(), parameter));
  state.exp_avg_sq(place.placed(state.exp_avg_sq(), parameter));
  if (work.rule.amsgrad)
    state.max_exp_avg_sq(state.max_exp_avg_sq().defined() ? place.placed(state.max_exp_avg_sq(), parameter)
                                                          : place.zeros(parameter));
  state.step(state.step() + 1);
  AdamUpdate update{work.group, work.rule, state.step(), parameter, {}, state.exp_avg(), state.exp_avg_sq()};
  if (work.rule.amsgrad) update.maximum = state.max_exp_avg_sq();
  if (parameter.numel() > 0) update.gradient = laid_out_as(parameter.grad(), parameter);
  return update;
}

// The arguments of one call.
struct Batch {
  AdamRule rule;
  std::vector<at::Tensor> parameters, gradients, averages, squares, maxima, steps;
  std::map<int64_t, at::Tensor> step_tensors;  // parameters that have always been used share one

  void add(const AdamUpdate& update) {
    rule = update.rule;
    at::Tensor& step = step_tensors[update.step];
    if (!step.defined())
      step = at::full({}, update.step, at::TensorOptions().dtype(at::kFloat).device(update.parameter.device()));
    parameters.push_back(update.parameter);
    gradients.push_back(update.gradient);
    averages.push_back(update.average);
    squares.push_back(update.square);
    if (update.maximum.defined()) maxima.push_back(update.maximum);
    steps.push_back(step);
  }

  void run() const {
    if (rule.is_decoupled) {
      at::_fused_adamw_(parameters, gradients, averages, squares, maxima, steps, rule.lr, rule.beta1, rule.beta2,
                        rule.weight_decay, rule.eps, rule.amsgrad, /*maximize=*/false);
    } else {
      at::_fused_adam_(parameters, gradients, averages, squares, maxima, steps, rule.lr, rule.beta1, rule.beta2,
                       rule.weight_decay, rule.eps, rule.amsgrad, /*maximize=*/false);
    }
    // The fused operators leave the versions of what they write alone, by which others know of writes.
    for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
  }
};

}  // namespace

at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.strides() == parameter.strides() && tensor.scalar_type() == parameter.scalar_type() &&
      tensor.device() == parameter.device())
    return tensor;
  at::Tensor copy = at::empty_like(parameter);
  copy.copy_(tensor);
  return copy;
}

std::vector<AdamWork> adam_work(const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
                                const AdamPlace& place) {
  std::unordered_set<const c10::TensorImpl*> wanted;
  if (chosen != nullptr)
    for (const at::Tensor& parameter : *chosen) wanted.insert(parameter.unsafeGetTensorImpl());
  std::vector<AdamWork> work;
  for (size_t index = 0; index < optimizer.param_groups().size(); ++index) {
    const auto& group = optimizer.param_groups()[index];
    const AdamRule rule = rule_of(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (chosen != nullptr && wanted.erase(parameter.unsafeGetTensorImpl()) == 0) continue;
      if (!parameter.grad().defined()) continue;
      check(parameter, place);
      work.push_back({parameter, index, rule});
    }
  }
  if (!wanted.empty())
    throw std::invalid_argument("step_parameters: " + std::to_string(wanted.size()) + " of " +
                                std::to_string(chosen->size()) + " tensors are no parameters of the optimizer");
  return work;
}

AdamUpdate begin_adam_update(torch::optim::Optimizer& optimizer, const AdamWork& work, const AdamPlace& place) {
  return work.rule.is_decoupled ? begin<torch::optim::AdamWParamState>(optimizer, work, place)
                                : begin<torch::optim::AdamParamState>(optimizer, work, place);
}

void fused_adam_update(const std::vector<AdamUpdate>& updates) {
  std::map<std::tuple<size_t, at::ScalarType, at::DeviceType, at::DeviceIndex>, Batch> batches;
  for (const AdamUpdate& update : updates) {
    const at::Tensor& parameter = update.parameter;
    if (parameter.numel() == 0) continue;
    batches[{update.group, parameter.scalar_type(), parameter.device().type(), parameter.device().index()}].add(update);
  }
  for (const auto& entry : batches) entry.second.run();
}

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  at::AutoGradMode recording(true);
  return closure();
}

}  // namespace tessera
