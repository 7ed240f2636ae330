#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of one group of Muon: of matrices, or with use_muon(false) of parameters that AdamW steps (adamw()).
struct MuonOptions : internal::ListedBetas<MuonOptions> {
  // Name in checkpoints.
  static constexpr const char* kName = "Muon";

  // Sets the learning rate.
  explicit MuonOptions(double lr = 1e-3) : ListedBetas(lr, 0.9, 0.95, 0.1) {}
  // Returns options for embeddings, heads, biases and norms.
  static MuonOptions adamw(double lr) { return MuonOptions(lr).use_muon(false); }

  TORCH_ARG(bool, use_muon) = true;  // false: AdamW
  // Of matrices: decay of the momentum.
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;  // of matrices: Nesterov's momentum
  TORCH_ARG(int64_t, ns_steps) = 5;  // of matrices: iterations of Newton and Schulz
  TORCH_ARG(bool, bfloat16) = true;  // dtype of exchange and products; false: fp32
  // Scales steps by lr * 0.2 * sqrt(max(rows, columns)), so that AdamW's learning rates apply (Moonlight). false: by lr
  // * sqrt(max(1, rows / columns)) (Jordan).
  TORCH_ARG(bool, match_rms_adamw) = false;
  TORCH_ARG(double, eps) = 1e-8;  // AdamW: added to the denominator

 public:
  // Throws std::invalid_argument if a value is out of range.
  void check() const;
  // Calls visit(name, value) for each option.
  template <class Visit>
  void visit(Visit visit) {
    ListedBetas::visit(visit);
    visit("use_muon", use_muon());
    visit("momentum", momentum());
    visit("nesterov", nesterov());
    auto steps = static_cast<double>(ns_steps());
    visit("ns_steps", steps);
    ns_steps(static_cast<int64_t>(steps));
    visit("bfloat16", bfloat16());
    visit("match_rms_adamw", match_rms_adamw());
    visit("eps", eps());
  }
};

// Muon's state of one parameter.
struct MuonParamState : internal::ListedState<MuonParamState> {
  TORCH_ARG(int64_t, step) = 0;            // number of steps taken
  TORCH_ARG(at::Tensor, momentum_buffer);  // of a matrix
  TORCH_ARG(at::Tensor, exp_avg);          // AdamW: average of gradients
  TORCH_ARG(at::Tensor, exp_avg_sq);       // AdamW: average of squared gradients

 public:
  // Calls visit(name, value) for each field.
  template <class Visit>
  void visit(Visit visit) {
    visit("step", step());
    visit("momentum_buffer", momentum_buffer());
    visit("exp_avg", exp_avg());
    visit("exp_avg_sq", exp_avg_sq());
  }
};

// Muon (Jordan et al., 2024; torch.optim.Muon): steps a matrix by its momentum, orthogonalized by Newton and Schulz's
// iteration, which brings all singular values near 1. AdamW steps the other parameters. A parameter of more than 2
// dimensions is treated as a matrix of its first dimension by all others, like Jordan's convolutions.
//
//   auto others = tessera::GroupRule<MuonOptions>{
//       [](const tessera::NamedShard& p) { return p.sizes.size() < 2 || p.fqn.starts_with("embedding"); },
//       MuonOptions::adamw(3e-4)};
//   tessera::Muon optimizer(fsdp, tessera::group_parameters(fsdp, {others}, MuonOptions(2e-2)));
//
// With a wrapper, one rank orthogonalizes each matrix; costs are balanced over the ranks. That rank receives the parts
// of the momentum and returns the parts of the result, in bf16 or fp32. Each rank works on one matrix at a time, while
// the next ones are in flight. A rank sends about its part of the matrices, and as many bytes of results (1/N of the
// results to all ranks, if every rank has all parameters). Results equal those of one process to rounding. OSS<Muon>
// assigns owners by the same costs. Momentum is stored where the parameter is; a step takes twice the memory of this
// rank's parts.
class Muon : public internal::ListedOptimizer<MuonOptions, MuonParamState, internal::Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Throws CommError. Throws std::invalid_argument for sparse gradients and matrices of fewer than 2 dimensions.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Returns the cost of a parameter's step in multiplications; 0 for AdamW. Owners are assigned by it.
  static int64_t step_cost(const NamedShard& parameter, const torch::optim::OptimizerOptions& options);

 private:
  struct Matrix;
  class Rounds;
  Matrix momentum_of(const at::Tensor& parameter, const MuonOptions& options);
  void orthogonalize(std::vector<Matrix>& matrices) const;
  void step_others();
};

// Returns an approximation of U V^T for a matrix [rows, columns] U S V^T, in its dtype, by a quintic iteration with
// coefficients 3.4445, -4.7750 and 2.0315. Singular values end between 0.7 and 1.2. A matrix of zeros stays zero.
// Throws std::invalid_argument unless it is a floating-point matrix.
at::Tensor orthogonalized(const at::Tensor& matrix, int64_t ns_steps = 5);

}  // namespace tessera
