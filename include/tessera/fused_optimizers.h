#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <vector>

#include <tessera/detail/partial_step.h>

namespace tessera {

// torch::optim's optimizer `Base` with one call of libtorch's fused kernel for all parameters of a group, dtype and
// device (under FullyShardedDataParallel all shards of a rank) instead of some ten operators for each: same results
// to rounding, same options, states and archives. Gradients may have any strides; step() throws
// std::invalid_argument for parameters that are not dense or not of floating-point type, and sparse gradients.
template <class Base>
class FusedOptimizer : public Base, public ChosenStep {
 public:
  using Base::Base;
  // One step; returns the closure's loss, if there is a closure. Not collective.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;
  // See ChosenStep.
  void step_parameters(const std::vector<at::Tensor>& parameters) override;
  // See ChosenStep.
  void require_steppable() override;
};

extern template class FusedOptimizer<torch::optim::Adam>;
extern template class FusedOptimizer<torch::optim::AdamW>;
extern template class FusedOptimizer<torch::optim::SGD>;

using Adam = FusedOptimizer<torch::optim::Adam>;    // Adam
using AdamW = FusedOptimizer<torch::optim::AdamW>;  // as Adam, with weights that decay by themselves
using SGD = FusedOptimizer<torch::optim::SGD>;      // with momentum in the same call

}  // namespace tessera
