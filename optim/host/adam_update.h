#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/host/adam_kernel.h"

namespace tessera::internal {

// Code that the optimizers of the Adam family share. All select and check parameters, and create states, in the same
// way. They differ in the placement of states (AdamPlacement), and in the code that applies the update.

// The update of one parameter. Defined tensors, except `rate` and `count`, have the parameter's sizes and strides.
struct AdamUpdate {
  size_t group = 0;
  AdamRule rule;
  int64_t step = 0;  // counted from 1
  at::Tensor parameter, gradient, average, square;
  at::Tensor maximum;  // undefined without amsgrad
  // In a recorded step, fp32 scalars on the device that replace rule.lr and step in the kernels. Otherwise undefined.
  at::Tensor rate, count;
};

struct AdamPlacement {
  const char* name;  // for errors, e.g. "a fused optimizer"
  // If the parameter cannot be stepped, returns the reason, to follow its shape in an error text. Otherwise returns "".
  std::string (*problem)(const at::Tensor& parameter);
  // `zeros` returns a new state tensor. `placed` returns `state`, or a copy of it if its memory or layout is wrong.
  at::Tensor (*zeros)(const at::Tensor& parameter);
  at::Tensor (*placed)(const at::Tensor& state, const at::Tensor& parameter);
};

// Returns, sorted, the parameters that the groups list twice, such as a tied weight from its module's parameters().
std::vector<const c10::TensorImpl*> parameters_listed_twice(const torch::optim::Optimizer& optimizer);

// Calls take(update) for each parameter that has a gradient, in the order of the groups. If `chosen` is not null, skips
// other parameters. Creates missing states, and increments step counts. Calls run() after the last update, and before
// each update of a parameter that is listed twice, because a call of a fused operator may step a parameter only once.
// Throws std::invalid_argument, with nothing changed, if the optimizer lacks a parameter of `chosen`, or a group has
// another optimizer's options. Also throws, naming the shape, if a parameter to be stepped is not dense, is not of
// floating-point type, has a sparse gradient, or has a placement.problem().
void for_each_adam_update(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
                          const AdamPlacement& placement, const std::function<void(AdamUpdate)>& take,
                          const std::function<void()>& run);

// Increments the step count of an update that a CUDA graph will replay. If the user replaced the states since the last
// step, copies the new values to the update's tensors, and makes these tensors the states again.
void prepare_adam_replay(torch::optim::Optimizer& optimizer, AdamUpdate& update, const AdamPlacement& placement);

// Returns `recorded`, the state tensor that a CUDA graph uses, after copying the values of `state` into it.
at::Tensor in_recorded_memory(const at::Tensor& state, const at::Tensor& recorded);

// Throws if for_each_adam_update() would throw for any parameter; changes nothing.
void require_steppable(torch::optim::Optimizer& optimizer, const AdamPlacement& placement);

// Applies the updates with libtorch's fused operators. Calls an operator once for each combination of group, dtype and
// device, and once for each parameter on disk.
void fused_adam_update(const std::vector<AdamUpdate>& updates);

// Returns a parameter's state. If there is none, creates a state with step 0 and with averages from zeros(parameter).
template <class State, class Zeros>
State& adam_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, Zeros zeros) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(zeros(parameter));
    fresh->exp_avg_sq(zeros(parameter));
    slot = std::move(fresh);
  }
  return static_cast<State&>(*slot);
}

// Returns `tensor` if it has the parameter's strides, dtype and device, and no lazy values. Otherwise returns a copy.
at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter);

// Returns whether the parameter is on disk. All arguments of one operator must fit into
// OffloadOptions::disk_buffer_bytes, so parameters on disk are stepped one by one.
bool is_on_disk(const at::Tensor& parameter);

// Runs the closure with autograd enabled and returns its loss. Without a closure, returns an undefined tensor.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

}  // namespace tessera::internal
