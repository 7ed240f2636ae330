#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include <tessera/detail/partial_step.h>

namespace tessera {

// torch::optim::Adam and AdamW for parameters in host memory: one pass over parameter, gradient and state in the
// widest vector instructions that the processor has, on all of the intra-operator threads; where a wrapper sends
// parameters to a device in 16 bit, that copy is written in the same pass. Options, states and archives are torch's;
// results agree to rounding (ZeRO-Offload's CPU Adam: Ren et al., 2021).
//
//   FullyShardedDataParallel fsdp(model, comm, {.offload = {.params = true, .grads = true}});
//   HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(3e-4));
//
// fp32 takes the pass, other floating-point types libtorch's fused operator. A gradient on a device is copied to the
// host first. Used by one thread at a time. Both steps throw std::invalid_argument, with nothing changed, for
// parameters that are not in host memory or not dense, and for sparse gradients.
//
// Steps that can be taken back (revocable_steps()) keep what parameter and state were, in host memory or on the disk:
// 12 bytes an element of fp32, 16 with amsgrad, from the first such step on. In host memory the new state is written
// beside the old one, which costs less than copies.
class HostAdam : public torch::optim::Adam, public PartialStep {
 public:
  using torch::optim::Adam::Adam;
  // One step; returns the closure's loss, if there is a closure. Not collective.
  at::Tensor step(LossClosure closure = nullptr) override;
  void step_parameters(const std::vector<at::Tensor>& parameters) override;
  void require_steppable() override;
  std::unique_ptr<RevocableSteps> revocable_steps() override;
};

// As HostAdam, with weights that decay by themselves.
class HostAdamW : public torch::optim::AdamW, public PartialStep {
 public:
  using torch::optim::AdamW::AdamW;
  // As HostAdam::step().
  at::Tensor step(LossClosure closure = nullptr) override;
  void step_parameters(const std::vector<at::Tensor>& parameters) override;
  void require_steppable() override;
  std::unique_ptr<RevocableSteps> revocable_steps() override;
};

}  // namespace tessera
