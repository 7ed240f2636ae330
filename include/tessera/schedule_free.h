#pragma once

#include <bit>
#include <cstdint>

#include <tessera/averages.h>
#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of ScheduleFree, each set by a function of its name. beta1 is above 0: gradients are taken at a point between
// z and the average.
struct ScheduleFreeOptions : ListedBetas<ScheduleFreeOptions> {
  // As checkpoints have it.
  static constexpr const char* kName = "ScheduleFreeAdamW";

  // With this learning rate.
  explicit ScheduleFreeOptions(double lr = 2.5e-3) : ListedBetas(lr, 0.9, 0.999, 0.0) {}

  TORCH_ARG(double, eps) = 1e-8;         // added to the denominator
  TORCH_ARG(int64_t, warmup_steps) = 0;  // of linear warm-up: there is no other schedule
  // Step t counts in the average as t^r times the largest learning rate so far to weight_lr_power.
  TORCH_ARG(double, r) = 0.0;
  TORCH_ARG(double, weight_lr_power) = 2.0;  // see above

 public:
  // Throws std::invalid_argument for a value out of its range.
  void check() const;
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    ListedBetas::visit(visit);
    visit("eps", eps());
    auto steps = static_cast<double>(warmup_steps());
    visit("warmup_steps", steps);
    warmup_steps(static_cast<int64_t>(steps));
    visit("r", r());
    visit("weight_lr_power", weight_lr_power());
  }
};

// What ScheduleFree keeps for a parameter.
struct ScheduleFreeParamState : ListedState<ScheduleFreeParamState> {
  TORCH_ARG(int64_t, step) = 0;       // steps taken
  TORCH_ARG(double, weight_sum) = 0;  // see above
  TORCH_ARG(double, lr_max) = 0;      // see above
  TORCH_ARG(at::Tensor, z);           // the point that steps are taken from
  TORCH_ARG(at::Tensor, exp_avg_sq);  // of their squares

 public:
  // Numbers are integers in checkpoints: those of floating-point type go as their 64 bits.
  template <class Visit>
  void visit(Visit visit) {
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

// Schedule-free AdamW (Defazio et al., 2024, algorithm 1 with Adam's base; schedulefree's AdamWScheduleFree): no
// learning rate schedule and no end that is known before; evaluation and export take the average of the iterates
// (swap_in_averages()), parameters in training are a point between it and the last. Element by element: the same bits
// under any sharding. Counts belong to parameters: steps without a gradient are none.
class ScheduleFreeAdamW : public ListedOptimizer<ScheduleFreeOptions, ScheduleFreeParamState, Sees::kElements>,
                          public Averages {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Not collective. Throws std::invalid_argument for sparse gradients, std::logic_error while averages are swapped in.
  at::Tensor step(LossClosure closure = nullptr) override;

  Scope swap_in_averages() override;  // not collective
  bool are_swapped_in() const override { return is_swapped_in_; }

 private:
  bool is_swapped_in_ = false;
};

}  // namespace tessera
