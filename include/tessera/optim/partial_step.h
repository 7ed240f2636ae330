#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera {

namespace internal {

// An optimizer that can step some of its parameters now and the others later. Must be used by one thread at a time. Not
// collective.
class ChosenStep {
 public:
  virtual ~ChosenStep() = default;
  // Steps each of `parameters` that has a gradient, like step(). Throws std::invalid_argument for a tensor that is
  // not a parameter of the optimizer.
  virtual void step_parameters(const std::vector<at::Tensor>& parameters) = 0;
  // Throws the error with which step() would reject the current parameters or gradients. Changes nothing.
  virtual void require_steppable() {}
};

// Returns whether the optimizer's class is derived from Tessera's Adam, AdamW, SGD, HostAdam or HostAdamW, and is none
// of these. Such a class may override step(), and step_parameters() would bypass the override.
bool may_have_own_step(const torch::optim::Optimizer& optimizer);

// Returns the optimizer as a ChosenStep. Returns null for any other class, and if may_have_own_step().
ChosenStep* chosen_step_of(torch::optim::Optimizer& optimizer);

// Calls take(group, parameter) for each parameter that has a gradient, in the order of the groups. Calls it twice for a
// parameter that is listed twice. If `chosen` is not null, skips parameters outside `chosen`. If the optimizer lacks a
// tensor of `chosen`, throws std::invalid_argument after the calls. So take() must collect parameters, but not step
// them.
void for_each_stepped(
    torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>* chosen,
    const std::function<void(torch::optim::OptimizerParamGroup& group, const at::Tensor& parameter)>& take);

}  // namespace internal

// An optimizer that can step some of its parameters in host memory now, on any thread, and the others later
// (StepInBackward). Derived classes implement step_parameters() and, if needed, require_steppable().
class PartialStep : public internal::ChosenStep {
 public:
  // Steps some of the parameters, and keeps copies of the previous values, so that the steps can be rolled back. The
  // optimizer must outlive this object. Must be used by one thread at a time. Not collective.
  class RevocableSteps {
   public:
    virtual ~RevocableSteps() = default;
    // Calls PartialStep::step_parameters(parameters), and keeps the previous elements of parameters and optimizer
    // state. May replace the state's tensors. A parameter must be stepped only once before keep() or roll_back().
    // Throws like step_parameters(), and also if memory or disk space for the copies is lacking. After an error, some
    // parameters may have been stepped; roll_back() restores these parameters.
    virtual void step(const std::vector<at::Tensor>& parameters) = 0;
    // Restores parameters, their 16-bit copies and the optimizer's state bit for bit. If a write to disk fails, throws.
    // The caller must then call this function again.
    virtual void roll_back() = 0;
    // Makes the steps final: a later roll_back() does not undo them.
    virtual void keep() = 0;
  };

  // Returns an object for steps that can be rolled back; null if unsupported.
  virtual std::unique_ptr<RevocableSteps> revocable_steps() { return nullptr; }
};

}  // namespace tessera
