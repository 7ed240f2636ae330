#pragma once

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Lion; each field has a setter of its name. beta1 weighs the average in the step, beta2 the stored average.
struct LionOptions : internal::ListedBetas<LionOptions> {
  // Name in checkpoints.
  static constexpr const char* kName = "Lion";

  // Sets the learning rate.
  explicit LionOptions(double lr = 1e-4) : ListedBetas(lr, 0.9, 0.99, 0.0) {}
};

// Lion's state of one parameter.
struct LionParamState : internal::ListedState<LionParamState> {
  TORCH_ARG(at::Tensor, exp_avg);  // the average of gradients

 public:
  // Calls visit(name, value) for each field.
  template <class Visit>
  void visit(Visit visit) {
    visit("exp_avg", exp_avg());
  }
};

// Lion (Chen et al., 2023, algorithm 2): the step is the sign of an average of momentum and gradient, with decoupled
// weight decay. Its state is half of Adam's. Learning rates are 3 to 10 times smaller than AdamW's, weight decay as
// much larger. Elementwise: bit-equal under any sharding.
class Lion : public internal::ListedOptimizer<LionOptions, LionParamState, internal::Sees::kElements> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Takes one step; one foreach call for each operation. Is not collective. Throws std::invalid_argument for sparse
  // gradients.
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera
