#pragma once

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Lion, each with a setter. beta1: weight of the average in a step; the gradient has the weight 1 - beta1.
// beta2: decay factor of the average.
struct LionOptions : internal::ListedBetas<LionOptions> {
  static constexpr const char* kName = "Lion";  // name in checkpoints

  explicit LionOptions(double lr = 1e-4) : ListedBetas(lr, 0.9, 0.99, 0.0) {}  // `lr`: the learning rate
};

// Lion's state of one parameter.
struct LionParamState : internal::ListedState<LionParamState> {
  TORCH_ARG(at::Tensor, exp_avg);  // the average of gradients

 public:
  // Calls visit(name, value) for each field.
  void visit(auto visit) { visit("exp_avg", exp_avg()); }
};

// Lion (Chen et al., 2023, algorithm 2). The step is lr times the sign of a weighted average of momentum and gradient,
// with decoupled weight decay. The state is half as large as Adam's. Good learning rates are 3 to 10 times smaller than
// with AdamW, and weight decay is larger by the same factor. Is elementwise: results are bit-equal under any sharding.
class Lion : public internal::ListedOptimizer<LionOptions, LionParamState, internal::Sees::kElements> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Takes one step, with one foreach call for each operation. Parameters on disk are stepped one at a time. Is not
  // collective. Throws std::invalid_argument for sparse gradients and parameters that are not dense.
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera
