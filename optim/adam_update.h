#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// What all optimizers of the Adam family here do alike: which parameters are stepped, what is refused, their states,
// and the update by libtorch's fused operators. What differs: where state is put, and whether another pass over
// memory (HostAdam's) takes the place of the operators.

// A group's options: torch::optim::AdamOptions or AdamWOptions.
struct AdamRule {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool amsgrad = false;
  bool is_decoupled = false;  // AdamW: weights decay by themselves. Adam: through the gradient
};

// One parameter's update. All tensors have the parameter's sizes and strides.
struct AdamUpdate {
  size_t group = 0;
  AdamRule rule;
  int64_t step = 0;  // the first is 1
  at::Tensor parameter, gradient, average, square;
  at::Tensor maximum;  // with amsgrad, else undefined
};

struct AdamPlace {
  const char* name;  // "a fused optimizer", for errors
  // What a parameter is that cannot be here, in words after its shape, or "".
  std::string (*problem)(const at::Tensor& parameter);
  // State for a parameter: new, and `state` if it does not lie as it must.
  at::Tensor (*zeros)(const at::Tensor& parameter);
  at::Tensor (*placed)(const at::Tensor& state, const at::Tensor& parameter);
};

// A parameter that has a gradient, with the options of its group.
struct AdamWork {
  at::Tensor parameter;
  size_t group = 0;
  AdamRule rule;
};

// Of all parameters, or of `chosen`, those that have a gradient, in the order of the groups. Throws
// std::invalid_argument, which names the shape, for one that cannot be stepped (not dense, a sparse gradient, not of
// floating-point type, what `place` says), and for one in `chosen` that the optimizer does not have.
std::vector<AdamWork> adam_work(const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
                                const AdamPlace& place);

// Counts a step in the parameter's state, which is made if there is none. Of a parameter of no elements (nothing of
// it is on this rank) nothing is to be updated.
AdamUpdate begin_adam_update(torch::optim::Optimizer& optimizer, const AdamWork& work, const AdamPlace& place);

// Takes the updates with libtorch's fused operator, one call for each group, dtype and device.
void fused_adam_update(const std::vector<AdamUpdate>& updates);

// `tensor`, or a copy of it with the parameter's strides, dtype and device.
at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& parameter);

// The closure's loss, recorded by autograd; undefined without one.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

}  // namespace tessera
