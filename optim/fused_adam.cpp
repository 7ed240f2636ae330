#include "tessera/optim/fused_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "tessera/trace/trace.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

// The arguments of one call.
struct Batch {
  Tensors parameters, gradients, averages, squares, maxima, steps;
};

// The kernels walk through memory: all tensors of a parameter must have its strides.
at::Tensor with_strides_of(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.strides() == parameter.strides() && tensor.scalar_type() == parameter.scalar_type()) return tensor;
  at::Tensor copy = at::empty_like(parameter);
  copy.copy_(tensor);
  return copy;
}

void check_fusable(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  std::ostringstream problem;
  if (!at::isFloatingType(parameter.scalar_type()))
    problem << "is " << parameter.scalar_type() << ", expected a floating-point type";
  if (gradient.layout() != at::kStrided)
    problem << "has a gradient of layout " << gradient.layout() << ", expected a dense one";
  if (!parameter.is_non_overlapping_and_dense())
    problem << "has strides " << parameter.strides() << ", expected dense ones";
  if (!problem.str().empty())
    throw std::invalid_argument("a fused optimizer: a parameter of shape " + c10::str(parameter.sizes()) + " " +
                                problem.str());
}

template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(at::zeros_like(parameter));
    fresh->exp_avg_sq(at::zeros_like(parameter));
    slot = std::move(fresh);
  }
  return static_cast<State&>(*slot);
}

// Counts the step in the parameter's state and adds it to its batch.
template <class State>
void add_to_batch(Batch& batch, std::map<int64_t, at::Tensor>& steps, State& state, const at::Tensor& parameter,
                  bool amsgrad) {
  state.step(state.step() + 1);
  if (amsgrad && !state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(at::zeros_like(parameter));
  if (parameter.numel() == 0) return;  // nothing of it is on this rank
  state.exp_avg(with_strides_of(state.exp_avg(), parameter));
  state.exp_avg_sq(with_strides_of(state.exp_avg_sq(), parameter));
  at::Tensor& step = steps[state.step()];  // parameters that have always been used share it
  if (!step.defined())
    step = at::full({}, state.step(), at::TensorOptions().dtype(at::kFloat).device(parameter.device()));
  batch.parameters.push_back(parameter);
  batch.gradients.push_back(with_strides_of(parameter.grad(), parameter));
  batch.averages.push_back(state.exp_avg());
  batch.squares.push_back(state.exp_avg_sq());
  if (amsgrad) {
    state.max_exp_avg_sq(with_strides_of(state.max_exp_avg_sq(), parameter));
    batch.maxima.push_back(state.max_exp_avg_sq());
  }
  batch.steps.push_back(step);
}

template <class State, class Options, class Launch>
at::Tensor fused_step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure,
                      Launch launch) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode recording(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "a fused step");
  for (auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    for (const at::Tensor& parameter : group.params())
      if (parameter.grad().defined()) check_fusable(parameter);  // before any is changed
    std::map<std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>,
             std::pair<Batch, std::map<int64_t, at::Tensor>>>
        batches;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& [batch, steps] = batches[{parameter.scalar_type(), parameter.device().type(), parameter.device().index()}];
      add_to_batch(batch, steps, state_of<State>(optimizer, parameter), parameter, options.amsgrad());
    }
    for (auto& [kind, entry] : batches) {
      if (entry.first.parameters.empty()) continue;
      launch(entry.first, options);
      // The fused operators leave the versions of what they write alone, by which others know of writes.
      for (const at::Tensor& parameter : entry.first.parameters) parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
  return loss;
}

}  // namespace

at::Tensor Adam::step(LossClosure closure) {
  using namespace torch::optim;
  return fused_step<AdamParamState, AdamOptions>(*this, closure, [](const Batch& batch, const AdamOptions& options) {
    at::_fused_adam_(batch.parameters, batch.gradients, batch.averages, batch.squares, batch.maxima, batch.steps,
                     options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(),
                     options.eps(), options.amsgrad(), /*maximize=*/false);
  });
}

at::Tensor AdamW::step(LossClosure closure) {
  using namespace torch::optim;
  return fused_step<AdamWParamState, AdamWOptions>(*this, closure, [](const Batch& batch, const AdamWOptions& options) {
    at::_fused_adamw_(batch.parameters, batch.gradients, batch.averages, batch.squares, batch.maxima, batch.steps,
                      options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(),
                      options.eps(), options.amsgrad(), /*maximize=*/false);
  });
}

}  // namespace tessera
