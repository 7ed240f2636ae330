#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <vector>

#include <tessera/optim/partial_step.h>

namespace tessera {
namespace internal {

// The optimizer `Base` of torch::optim, but with one call of libtorch's fused kernel for all parameters of the same
// group, dtype and device. torch::optim runs about ten operators for each parameter. Under FullyShardedDataParallel,
// one call covers all shards of a rank. Results equal those of `Base` up to rounding. Options, states and archives are
// those of `Base`. On devices, the learning rate is rounded to fp32 unless parameters are fp64, so that captured and
// eager steps are bit-equal. On CPUs, SGD steps 16-bit parameters by operators, because libtorch's kernel has a bug for
// them (pytorch#191763). Gradients may have any strides. step() throws std::invalid_argument for sparse gradients, for
// parameters that are not dense or not of floating-point type, and for groups with options of another class.
template <class Base>
class FusedOptimizer : public Base, public ChosenStep {
 public:
  using Base::Base;
  // Takes one step. If there is a closure, returns its loss. Not collective.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;
  void step_parameters(const std::vector<at::Tensor>& parameters) override;  // see ChosenStep
  void require_steppable() override;                                         // see ChosenStep
};

extern template class FusedOptimizer<torch::optim::Adam>;
extern template class FusedOptimizer<torch::optim::AdamW>;
extern template class FusedOptimizer<torch::optim::SGD>;

}  // namespace internal

using Adam = internal::FusedOptimizer<torch::optim::Adam>;    // fused torch::optim::Adam
using AdamW = internal::FusedOptimizer<torch::optim::AdamW>;  // fused torch::optim::AdamW, with decoupled weight decay
using SGD = internal::FusedOptimizer<torch::optim::SGD>;  // fused torch::optim::SGD; updates momentum in the same call

}  // namespace tessera
