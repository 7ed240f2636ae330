#pragma once

#include <cstdint>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Adafactor, each set by a function of its name. lr is the most: step t takes min(lr, 1 / sqrt(t)) of the
// parameter's size.
struct AdafactorOptions : ListedDecay<AdafactorOptions> {
  // As checkpoints have it.
  static constexpr const char* kName = "Adafactor";

  // With this learning rate.
  explicit AdafactorOptions(double lr = 1e-2) : ListedDecay(lr, 0.0) {}

  TORCH_ARG(double, beta2_decay) = -0.8;    // what of step t is new in the averages: t^beta2_decay
  TORCH_ARG(double, eps1) = 0;              // least root of an average; 0: the epsilon of the parameter's dtype
  TORCH_ARG(double, eps2) = 1e-3;           // least size (root of the mean square) of a parameter
  TORCH_ARG(double, clip_threshold) = 1.0;  // largest size of a direction

 public:
  // Throws std::invalid_argument for a value out of its range.
  void check() const;
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    ListedDecay::visit(visit);
    visit("beta2_decay", beta2_decay());
    visit("eps1", eps1());
    visit("eps2", eps2());
    visit("clip_threshold", clip_threshold());
  }
};

// What Adafactor keeps for a parameter.
struct AdafactorParamState : ListedState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;           // steps taken
  TORCH_ARG(at::Tensor, exp_avg_sq_row);  // fp32, of matrices: a number for each row
  TORCH_ARG(at::Tensor, exp_avg_sq_col);  // see above
  TORCH_ARG(at::Tensor, exp_avg_sq);      // fp32, of others

 public:
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    visit("step", step());
    visit("exp_avg_sq_row", exp_avg_sq_row());
    visit("exp_avg_sq_col", exp_avg_sq_col());
    visit("exp_avg_sq", exp_avg_sq());
  }
};

// Adafactor (Shazeer and Stern, 2018, algorithms 4 and 5; torch.optim.Adafactor): squares of gradients are averaged by
// rows and columns of the last two dimensions, so a matrix has rows + columns numbers of state; no momentum.
//
// Sums over a matrix are over all of its parts: two all-reduces a step, of rows + columns doubles for each matrix, and
// of a double for each parameter. Equal to one process to rounding. States of matrices are the same on all ranks.
class Adafactor : public ListedOptimizer<AdafactorOptions, AdafactorParamState, Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Throws CommError, and std::invalid_argument for sparse gradients and parameters that are not dense.
  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  struct Work;
  void average_squares(std::vector<Work>& all, std::vector<double>& parameter_squares) const;
  void sum_over_ranks(at::Tensor& sums, const char* what) const;
};

}  // namespace tessera
