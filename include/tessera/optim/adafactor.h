#pragma once

#include <cstdint>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Adafactor; each field has a setter of its name. Step t has the size min(lr, 1 / sqrt(t)) times the
// parameter's root mean square.
struct AdafactorOptions : internal::ListedDecay<AdafactorOptions> {
  static constexpr const char* kName = "Adafactor";  // name in checkpoints

  explicit AdafactorOptions(double lr = 1e-2) : ListedDecay(lr, 0.0) {}  // `lr`: the learning rate

  TORCH_ARG(double, beta2_decay) = -0.8;    // weight of step t in the averages: t^beta2_decay
  TORCH_ARG(double, eps1) = 0;              // lower bound of row means and of roots of averages; 0: dtype's epsilon
  TORCH_ARG(double, eps2) = 1e-3;           // lower bound of a parameter's root mean square
  TORCH_ARG(double, clip_threshold) = 1.0;  // upper bound of an update's root mean square; 1 or more

 public:
  void check() const;  // throws std::invalid_argument if a value is out of range
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    ListedDecay::visit(visit);
    visit("beta2_decay", beta2_decay());
    visit("eps1", eps1());
    visit("eps2", eps2());
    visit("clip_threshold", clip_threshold());
  }
};

// Adafactor's state of one parameter, in fp32, or in fp64 for fp64 parameters.
struct AdafactorParamState : internal::ListedState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;           // number of steps taken
  TORCH_ARG(at::Tensor, exp_avg_sq_row);  // matrices: average squared gradient of each row
  TORCH_ARG(at::Tensor, exp_avg_sq_col);  // matrices: average squared gradient of each column
  TORCH_ARG(at::Tensor, exp_avg_sq);      // other parameters: average squared gradients

 public:
  // Calls visit(name, value) for each field.
  void visit(auto visit) {
    visit("step", step());
    visit("exp_avg_sq_row", exp_avg_sq_row());
    visit("exp_avg_sq_col", exp_avg_sq_col());
    visit("exp_avg_sq", exp_avg_sq());
  }
};

// Adafactor (Shazeer and Stern, 2018, algorithms 4 and 5; torch.optim.Adafactor), without momentum. Squared gradients
// are averaged over rows and columns of the last two dimensions, so a matrix has a state of rows + columns numbers.
//
// Sums over a matrix include the parts on other ranks. If parameters are sharded, a step issues three all-reduces: of a
// flag for each parameter; of rows + columns doubles for each matrix and one double for each parameter; of one double
// for each parameter. Results equal those of one process up to rounding. Matrix states are equal on all ranks.
class Adafactor : public internal::ListedOptimizer<AdafactorOptions, AdafactorParamState, internal::Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Takes one step. Throws CommError. Throws std::invalid_argument for sparse gradients and non-dense parameters.
  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  struct Work;
  void average_squares(std::vector<Work>& all, std::vector<double>& parameter_squares) const;
  void sum_over_ranks(at::Tensor& sums, const char* what) const;
};

}  // namespace tessera
