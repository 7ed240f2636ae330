#include "optim/host/adam_update.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <tessera/detail/listed_optimizer.h>
#include <tessera/optim/partial_step.h>
#include "core/paging/residency.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/stream_uses.h"
#include "offload/disk/disk_pager.h"
#include "optim/host/fused_kernels.h"

namespace tessera::internal {
namespace {

template <class Options>
AdamRule rule_of(const Options& options, bool is_decoupled) {
  const auto [beta1, beta2] = options.betas();
  return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), is_decoupled};
}

AdamRule rule_of(const torch::optim::OptimizerOptions& options) {
  const auto* decoupled = dynamic_cast<const torch::optim::AdamWOptions*>(&options);
  return decoupled != nullptr ? rule_of(*decoupled, true)
                              : rule_of(dynamic_cast<const torch::optim::AdamOptions&>(options), false);
}

void require_steppable(const at::Tensor& parameter, const AdamPlacement& placement) {
  if (const std::string problem = placement.problem(parameter); !problem.empty())
    throw std::invalid_argument(c10::str(placement.name, ": a parameter of shape ", parameter.sizes(), " ", problem));
  require_dense(parameter, placement.name);
}

// Sets the state tensors of `update` to the parameter's state, which is created if missing. Increments the step count.
template <class State>
State& begin(torch::optim::Optimizer& optimizer, AdamUpdate& update, const AdamPlacement& placement) {
  const at::Tensor& parameter = update.parameter;
  State& state = adam_state<State>(optimizer, parameter, placement.zeros);
  state.exp_avg(update.average = placement.placed(state.exp_avg(), parameter));
  state.exp_avg_sq(update.square = placement.placed(state.exp_avg_sq(), parameter));
  if (update.rule.amsgrad) {
    const at::Tensor& known = state.max_exp_avg_sq();
    state.max_exp_avg_sq(update.maximum =
                             known.defined() ? placement.placed(known, parameter) : placement.zeros(parameter));
  }
  state.step(update.step = state.step() + 1);
  return state;
}

template <class State>
void prepare_replay(torch::optim::Optimizer& optimizer, AdamUpdate& update, const AdamPlacement& placement) {
  AdamUpdate now{.rule = update.rule, .parameter = update.parameter};
  State& state = begin<State>(optimizer, now, placement);
  update.step = now.step;
  state.exp_avg(in_recorded_memory(now.average, update.average));
  state.exp_avg_sq(in_recorded_memory(now.square, update.square));
  if (update.rule.amsgrad) state.max_exp_avg_sq(in_recorded_memory(now.maximum, update.maximum));
}

// Arguments of one call of a fused operator.
struct Batch {
  AdamRule rule;
  std::vector<at::Tensor> parameters, gradients, averages, squares, maxima, steps;
  std::map<int64_t, at::Tensor> step_tensors;  // one tensor for all parameters with equal step counts
  at::Tensor rate;

  void add(const AdamUpdate& update) {
    rule = update.rule;
    rate = update.rate;
    at::Tensor step = update.count;
    if (!step.defined()) step = step_tensors[update.step];
    if (!step.defined())
      step = step_tensors[update.step] =
          at::full({}, update.step, at::TensorOptions().dtype(at::kFloat).device(update.parameter.device()));
    parameters.push_back(update.parameter);
    gradients.push_back(update.gradient);
    averages.push_back(update.average);
    squares.push_back(update.square);
    if (update.maximum.defined()) maxima.push_back(update.maximum);
    steps.push_back(step);
  }

  void run() const {
    rate.defined() ? call(rate) : call(rate_of_kernels(rule.lr, parameters[0]));
    // Fused operators do not raise version counters. Tessera detects writes by these counters.
    for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
  }

  template <class Rate>  // double or at::Tensor
  void call(const Rate& lr) const {
    if (rule.is_decoupled) {
      at::_fused_adamw_(parameters, gradients, averages, squares, maxima, steps, lr, rule.beta1, rule.beta2,
                        rule.weight_decay, rule.eps, rule.amsgrad, /*maximize=*/false);
    } else {
      at::_fused_adam_(parameters, gradients, averages, squares, maxima, steps, lr, rule.beta1, rule.beta2,
                       rule.weight_decay, rule.eps, rule.amsgrad, /*maximize=*/false);
    }
  }
};

}  // namespace

at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.strides() == parameter.strides() && tensor.scalar_type() == parameter.scalar_type() &&
      tensor.device() == parameter.device() && !has_lazy_values(tensor))
    return tensor;
  return at::empty_like(parameter).copy_(tensor);
}

std::vector<const c10::TensorImpl*> parameters_listed_twice(const torch::optim::Optimizer& optimizer) {
  std::vector<const c10::TensorImpl*> listed;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) listed.push_back(parameter.unsafeGetTensorImpl());
  std::ranges::sort(listed);
  std::vector<const c10::TensorImpl*> twice;
  for (size_t i = 1; i < listed.size(); ++i)
    if (listed[i] == listed[i - 1]) twice.push_back(listed[i]);
  return twice;
}

void for_each_adam_update(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
                          const AdamPlacement& placement, const std::function<void(AdamUpdate)>& take,
                          const std::function<void()>& run) {
  std::vector<AdamUpdate> updates;
  for_each_stepped(optimizer, chosen, [&](torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter) {
    require_steppable(parameter, placement);
    const auto index = static_cast<size_t>(&group - optimizer.param_groups().data());
    updates.push_back({.group = index, .rule = rule_of(group.options()), .parameter = parameter});
  });
  const auto listed_twice = parameters_listed_twice(optimizer);
  for (AdamUpdate& update : updates) {
    if (std::ranges::binary_search(listed_twice, update.parameter.unsafeGetTensorImpl())) run();
    if (update.rule.is_decoupled)
      begin<torch::optim::AdamWParamState>(optimizer, update, placement);
    else
      begin<torch::optim::AdamParamState>(optimizer, update, placement);
    // A parameter without elements on this rank needs no gradient: note_write_if_empty() takes the place of its update.
    if (update.parameter.numel() > 0) update.gradient = laid_out_as(update.parameter.grad(), update.parameter);
    take(std::move(update));
  }
  run();
}

void prepare_adam_replay(torch::optim::Optimizer& optimizer, AdamUpdate& update, const AdamPlacement& placement) {
  update.rule.is_decoupled ? prepare_replay<torch::optim::AdamWParamState>(optimizer, update, placement)
                           : prepare_replay<torch::optim::AdamParamState>(optimizer, update, placement);
}

at::Tensor in_recorded_memory(const at::Tensor& state, const at::Tensor& recorded) {
  if (state.const_data_ptr() == recorded.const_data_ptr()) return recorded;
  recorded.copy_(state);
  state.record_stream(current_stream(state.device()));  // `state` may be freed before the copy has ended
  return recorded;
}

void require_steppable(torch::optim::Optimizer& optimizer, const AdamPlacement& placement) {
  for_each_stepped(optimizer, nullptr, [&](auto&, const at::Tensor& each) { require_steppable(each, placement); });
}

void fused_adam_update(const std::vector<AdamUpdate>& updates) {
  std::map<std::tuple<size_t, at::ScalarType, at::DeviceType, at::DeviceIndex>, Batch> batches;
  for (const AdamUpdate& update : updates) {
    const at::Tensor& parameter = update.parameter;
    if (note_write_if_empty(parameter)) continue;
    if (is_on_disk(parameter)) {
      Batch alone;
      alone.add(update);
      alone.run();
      continue;
    }
    batches[{update.group, parameter.scalar_type(), parameter.device().type(), parameter.device().index()}].add(update);
  }
  for (const auto& entry : batches) entry.second.run();
}

bool is_on_disk(const at::Tensor& parameter) { return DiskPager::of(parameter) != nullptr; }

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  at::AutoGradMode recording(true);
  return closure();
}

}  // namespace tessera::internal
