#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/host/adam_kernel.h"

namespace tessera::internal {

// Code that all optimizers of the Adam family share: selection and checks of parameters, their states, and the update
// by libtorch's fused operators. The optimizers differ in the placement of states and in the update.

// One parameter's update. All tensors have the parameter's sizes and strides.
struct AdamUpdate {
  size_t group = 0;
  AdamRule rule;
  int64_t step = 0;  // counted from 1
  at::Tensor parameter, gradient, average, square;
  at::Tensor maximum;  // undefined without amsgrad
  // Scalar fp32 tensors on the device that recorded kernels read instead of rule.lr and step; otherwise undefined.
  at::Tensor rate, count;
};

struct AdamPlacement {
  const char* name;  // for errors, e.g. "a fused optimizer"
  // Returns why a parameter cannot be stepped, as words that follow the parameter's shape in an error; "" if it can.
  std::string (*problem)(const at::Tensor& parameter);
  // `zeros` returns a new state tensor. `placed` returns `state`, or a copy in the required memory and layout.
  at::Tensor (*zeros)(const at::Tensor& parameter);
  at::Tensor (*placed)(const at::Tensor& state, const at::Tensor& parameter);
};

// Calls take(update) for each parameter (or each of `chosen`) that has a gradient, in the order of the groups. Creates
// missing states, and counts the step. Calls run() after the last update, and before an update of a parameter that
// take() has received since the last run(): a tied weight may be listed twice, and is then stepped twice. Throws
// std::invalid_argument, and changes nothing, if the optimizer lacks a parameter of `chosen`. Also throws, naming the
// shape, if a parameter is not dense, is not of floating-point type, has a sparse gradient, or is refused by
// `placement`.
void for_each_adam_update(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
                          const AdamPlacement& placement, const std::function<void(AdamUpdate)>& take,
                          const std::function<void()>& run);

// Counts the step of an update that a CUDA graph will replay. If the user replaced the states since the last step,
// copies their values to the update's tensors, and makes these tensors the states again.
void prepare_adam_replay(torch::optim::Optimizer& optimizer, AdamUpdate& update, const AdamPlacement& placement);

// Returns `recorded`, the state tensor that a CUDA graph uses, after copying the values of `state` into it.
at::Tensor in_recorded_memory(const at::Tensor& state, const at::Tensor& recorded);

// Throws if for_each_adam_update() would throw for any parameter; changes nothing.
void require_steppable(torch::optim::Optimizer& optimizer, const AdamPlacement& placement);

// Applies the updates by libtorch's fused operators. Calls one operator for each group, dtype and device, and a
// separate one for each parameter on disk.
void fused_adam_update(const std::vector<AdamUpdate>& updates);

// Returns a parameter's state. If missing, creates a state with step 0 and zeros(parameter).
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

// Returns `tensor`, or a copy with the parameter's strides, dtype and device.
at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter);

// Returns whether the parameter is on disk. All arguments of one operator must fit into
// OffloadOptions::disk_buffer_bytes, so parameters on disk are stepped one by one.
bool is_on_disk(const at::Tensor& parameter);

// Returns the closure's loss, with autograd recording; undefined without a closure.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

}  // namespace tessera::internal
