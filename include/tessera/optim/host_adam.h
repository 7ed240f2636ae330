#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include <tessera/optim/partial_step.h>

namespace tessera {

// torch::optim::Adam and AdamW for parameters in host memory (ZeRO-Offload's CPU Adam: Ren et al., 2021). A step is one
// pass over parameter, gradient and state, with the processor's widest vector instructions, on all intra-operator
// threads. If a wrapper sends 16-bit copies of parameters to a device, the pass also writes these copies. Options,
// states and archives are torch's; results are equal up to rounding.
//
//   FullyShardedDataParallel fsdp(model, comm, {.offload = {.params = true, .grads = true}});
//   HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(3e-4));
//
// The pass steps fp32 parameters in host memory. libtorch's fused operators step other floating-point types, and
// parameters on a device (OffloadOptions::device_fraction), on the current stream. For a parameter in host memory, a
// gradient on a device is first copied to the host. Must be used by one thread at a time. If a gradient is sparse, a
// parameter is not dense, or a group has options of another class, both step functions throw std::invalid_argument,
// with nothing changed.
//
// Steps of revocable_steps() keep previous values beside the parameter: in host memory, on disk or on the device. The
// first step allocates 12 bytes for each fp32 element, 16 with amsgrad. In host memory, a step writes the new state to
// spare tensors, and keeps the old tensors as the previous values. This saves a copy.
class HostAdam : public torch::optim::Adam, public PartialStep {
 public:
  using torch::optim::Adam::Adam;
  // Takes one step. If there is a closure, returns its loss. Not collective.
  at::Tensor step(LossClosure closure = nullptr) override;
  // Steps each of `parameters` that has a gradient: see PartialStep.
  void step_parameters(const std::vector<at::Tensor>& parameters) override;
  // Throws the errors that step() would throw for the current parameters and gradients; changes nothing.
  void require_steppable() override;
  std::unique_ptr<RevocableSteps> revocable_steps() override;  // null if a parameter is listed twice
};

// HostAdam with decoupled weight decay.
class HostAdamW : public torch::optim::AdamW, public PartialStep {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;                   // see HostAdam::step()
  void step_parameters(const std::vector<at::Tensor>& parameters) override;  // see HostAdam::step_parameters()
  void require_steppable() override;                                         // see HostAdam::require_steppable()
  std::unique_ptr<RevocableSteps> revocable_steps() override;
};

}  // namespace tessera
