#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera {

// Steps of some of an optimizer's parameters that can be taken back, from copies. Refers to the optimizer, which
// outlives it. Used by one thread at a time; nothing here is collective.
class RevocableSteps {
 public:
  virtual ~RevocableSteps() = default;
  // PartialStep::step_parameters(parameters), with copies of what it changes: the parameters' elements, and the
  // optimizer's state of them (whose tensors may be others afterwards). A parameter once before keep() or roll_back().
  // Throws what that throws, and for copies that there is no room for; some may have been stepped then, and roll_back()
  // knows which.
  virtual void step(const std::vector<at::Tensor>& parameters) = 0;
  // Parameters, their copies in 16 bit, and the optimizer's state become bit for bit what they were before these steps.
  // Throws what writing throws (a disk): to be called again.
  virtual void roll_back() = 0;
  // The steps stay.
  virtual void keep() = 0;
};

// An optimizer that can take a step for some of its parameters and leave the others for later. Used by one thread at a
// time, as step() is; nothing here is collective.
class ChosenStep {
 public:
  virtual ~ChosenStep() = default;
  // What step() does, for those of `parameters` that have a gradient. Throws std::invalid_argument
  // for a tensor that is no parameter of the optimizer.
  virtual void step_parameters(const std::vector<at::Tensor>& parameters) = 0;
  // Throws what step() would throw of its parameters and gradients before it changes any; changes nothing.
  virtual void require_steppable() {}
};

// Whether the optimizer's class is derived from one of Tessera's and may have a step() of its own, which
// step_parameters() does not call.
bool may_have_own_step(const torch::optim::Optimizer& optimizer);

// The optimizer as one of these, null if it is none, and where it may have a step() of its own.
ChosenStep* chosen_step_of(torch::optim::Optimizer& optimizer);

// Calls take(group, parameter) for each of the optimizer's parameters, or of `chosen` unless it is null, that has a
// gradient, in the order of the groups. Throws std::invalid_argument, after those calls, if the optimizer lacks some of
// `chosen`: so take() only collects.
void for_each_stepped(
    torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
    const std::function<void(torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter)>& take);

// One that does so in the host's memory, on any thread (StepInBackward).
class PartialStep : public ChosenStep {
 public:
  // For steps that may have to be taken back; null: this optimizer cannot.
  virtual std::unique_ptr<RevocableSteps> revocable_steps() { return nullptr; }
};

}  // namespace tessera
