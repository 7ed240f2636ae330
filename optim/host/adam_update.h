#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/host/adam_kernel.h"

namespace tessera::internal {

// What all optimizers of the Adam family here do alike: which parameters are stepped, what is refused, their states,
// and the update by libtorch's fused operators. They differ in where state lies, and in what makes the update.

// One parameter's update. All tensors have the parameter's sizes and strides.
struct AdamUpdate {
  size_t group = 0;
  AdamRule rule;
  int64_t step = 0;  // the first is 1
  at::Tensor parameter, gradient, average, square;
  at::Tensor maximum;  // with amsgrad, else undefined
};

struct AdamPlacement {
  const char* name;  // "a fused optimizer", for errors
  // Why a parameter cannot be stepped here, in words after its shape, or "".
  std::string (*problem)(const at::Tensor& parameter);
  // State for a parameter: new, and `state` or a copy of it that lies as it must.
  at::Tensor (*zeros)(const at::Tensor& parameter);
  at::Tensor (*placed)(const at::Tensor& state, const at::Tensor& parameter);
};

// Calls take(update) for each parameter, or each of `chosen`, that has a gradient, in the order of the groups, with
// its step counted in its state, which is made if there is none. Before anything is changed, throws
// std::invalid_argument, which names the shape, for one that cannot be stepped (not dense, a sparse gradient, not of
// floating-point type, what `placement` says), and for one in `chosen` that the optimizer does not have.
void for_each_adam_update(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
                          const AdamPlacement& placement, const std::function<void(AdamUpdate)>& take);

// Throws what it would throw for all parameters, before it changes any.
void require_steppable(torch::optim::Optimizer& optimizer, const AdamPlacement& placement);

// Takes the updates with libtorch's fused operator, one call for each group, dtype and device, and for each parameter
// that is on a disk.
void fused_adam_update(const std::vector<AdamUpdate>& updates);

// A parameter's state, of no steps and of what zeros(parameter) returns if it has none.
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

// `tensor`, or a copy of it with the parameter's strides, dtype and device.
at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter);

// Whether the parameter comes from a disk when an operator uses it. What one operator is given has to fit into
// CpuOffload::disk_buffer_bytes together, so such parameters are stepped one at a time.
bool is_on_disk(const at::Tensor& parameter);

// The closure's loss, recorded by autograd; undefined without one.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

}  // namespace tessera::internal
