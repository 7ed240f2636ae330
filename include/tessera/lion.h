#pragma once

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Lion, each set by a function of its name. beta1 is of the average in the step, beta2 of the one that is
// kept.
struct LionOptions : ListedBetas<LionOptions> {
  // As checkpoints have it.
  static constexpr const char* kName = "Lion";

  // With this learning rate.
  explicit LionOptions(double lr = 1e-4) : ListedBetas(lr, 0.9, 0.99, 0.0) {}
};

// What Lion keeps for a parameter.
struct LionParamState : ListedState<LionParamState> {
  TORCH_ARG(at::Tensor, exp_avg);  // the average of gradients

 public:
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    visit("exp_avg", exp_avg());
  }
};

// Lion (Chen et al., 2023, algorithm 2): steps are the sign of an average of momentum and gradient, with decoupled
// weight decay. Half of Adam's state; learning rates are 3 to 10 times smaller than AdamW's, weight decays as much
// larger. Element by element: the same bits under any sharding.
class Lion : public ListedOptimizer<LionOptions, LionParamState, Sees::kElements> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // One step, a foreach call for each operation. Not collective. Throws std::invalid_argument for sparse gradients.
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera
