#pragma once

#include <bit>
#include <cstdint>

#include <tessera/detail/listed_optimizer.h>
#include <tessera/optim/averages.h>

namespace tessera {

// Options of ScheduleFreeAdamW; each field has a setter of its name. Gradients are computed at a point between the last
// iterate and the average. beta1, which must be above 0, is the weight of the average in this point.
struct ScheduleFreeOptions : internal::ListedBetas<ScheduleFreeOptions> {
  static constexpr const char* kName = "ScheduleFreeAdamW";  // name in checkpoints

  explicit ScheduleFreeOptions(double lr = 2.5e-3) : ListedBetas(lr, 0.9, 0.999, 0.0) {}  // `lr`: the learning rate

  TORCH_ARG(double, eps) = 1e-8;         // added to the denominator
  TORCH_ARG(int64_t, warmup_steps) = 0;  // number of steps of linear warm-up
  // Step t has the weight t^r * lr_max^weight_lr_power in the average (see ScheduleFreeParamState::lr_max).
  TORCH_ARG(double, r) = 0.0;
  TORCH_ARG(double, weight_lr_power) = 2.0;  // see `r`

 public:
  void check() const;  // throws std::invalid_argument if a value is out of range
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    ListedBetas::visit(visit);
    visit("eps", eps());
    internal::visit_whole_number(visit, "warmup_steps", warmup_steps());
    visit("r", r());
    visit("weight_lr_power", weight_lr_power());
  }
};

// ScheduleFreeAdamW's state of one parameter.
struct ScheduleFreeParamState : internal::ListedState<ScheduleFreeParamState> {
  TORCH_ARG(int64_t, step) = 0;       // number of steps taken
  TORCH_ARG(double, weight_sum) = 0;  // sum of the weights of all steps
  TORCH_ARG(double, lr_max) = 0;      // largest learning rate so far, with warm-up and bias correction
  TORCH_ARG(at::Tensor, z);           // the iterate z of the paper, which each step updates
  TORCH_ARG(at::Tensor, exp_avg_sq);  // average of squared gradients

 public:
  // Calls visit(name, value) for each field. For checkpoints, passes each double as the integer with the same bits.
  void visit(auto visit) {
    visit("step", step());
    auto visit_bits = [&](const char* name, double& field) {
      auto bits = std::bit_cast<int64_t>(field);
      visit(name, bits);
      field = std::bit_cast<double>(bits);
    };
    visit_bits("weight_sum_bits", weight_sum());
    visit_bits("lr_max_bits", lr_max());
    visit("z", z());
    visit("exp_avg_sq", exp_avg_sq());
  }
};

// Schedule-free AdamW (Defazio et al., 2024, algorithm 1 with Adam's base; schedulefree's AdamWScheduleFree). Needs no
// learning-rate schedule, and no total number of steps. Evaluation and export use the average of the iterates
// (swap_in_averages()). In training, parameters are between the average and the last iterate. Elementwise: results are
// bit-equal under any sharding. Each parameter counts only the steps in which it had a gradient.
class ScheduleFreeAdamW
    : public internal::ListedOptimizer<ScheduleFreeOptions, ScheduleFreeParamState, internal::Sees::kElements>,
      public Averages {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Takes one step. Is not collective. Throws std::invalid_argument for sparse gradients and parameters that are not
  // dense, and std::logic_error while averages are swapped in.
  at::Tensor step(LossClosure closure = nullptr) override;

  ScopeExit swap_in_averages() override;                           // see Averages; not collective
  bool are_swapped_in() const override { return is_swapped_in_; }  // whether a scope of swap_in_averages() is open

 private:
  bool is_swapped_in_ = false;
};

}  // namespace tessera
