#pragma once

#include <cstdint>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of one group of Muon. With use_muon(false), AdamW steps the group's parameters; see adamw().
struct MuonOptions : internal::ListedBetas<MuonOptions> {
  static constexpr const char* kName = "Muon";  // name in checkpoints

  explicit MuonOptions(double lr = 1e-3) : ListedBetas(lr, 0.9, 0.95, 0.1) {}  // `lr`: the learning rate
  // Returns options for parameters that AdamW steps: embeddings, heads, biases and norms.
  static MuonOptions adamw(double lr) { return MuonOptions(lr).use_muon(false); }

  TORCH_ARG(bool, use_muon) = true;  // true: parameters are matrices, which Muon steps; false: AdamW steps them
  // Matrices only: decay factor of the momentum.
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;  // matrices only: Nesterov's momentum
  TORCH_ARG(int64_t, ns_steps) = 5;  // matrices only: iterations of Newton and Schulz, 1 to 99
  TORCH_ARG(bool, bfloat16) = true;  // matrices only: true computes and sends in bfloat16, false in fp32
  // true: steps are scaled by lr * 0.2 * sqrt(max(rows, columns)), so that AdamW's learning rates apply (Moonlight).
  // false: steps are scaled by lr * sqrt(max(1, rows / columns)) (Jordan).
  TORCH_ARG(bool, match_rms_adamw) = false;
  TORCH_ARG(double, eps) = 1e-8;  // AdamW only: added to the denominator

 public:
  void check() const;  // throws std::invalid_argument if a value is out of range
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    ListedBetas::visit(visit);
    visit("use_muon", use_muon());
    visit("momentum", momentum());
    visit("nesterov", nesterov());
    internal::visit_whole_number(visit, "ns_steps", ns_steps());
    visit("bfloat16", bfloat16());
    visit("match_rms_adamw", match_rms_adamw());
    visit("eps", eps());
  }
};

// Muon's state of one parameter.
struct MuonParamState : internal::ListedState<MuonParamState> {
  TORCH_ARG(int64_t, step) = 0;            // number of steps taken
  TORCH_ARG(at::Tensor, momentum_buffer);  // matrices: the momentum
  TORCH_ARG(at::Tensor, exp_avg);          // AdamW: average of gradients
  TORCH_ARG(at::Tensor, exp_avg_sq);       // AdamW: average of squared gradients

 public:
  // Calls visit(name, value) for each field.
  void visit(auto visit) {
    visit("step", step());
    visit("momentum_buffer", momentum_buffer());
    visit("exp_avg", exp_avg());
    visit("exp_avg_sq", exp_avg_sq());
  }
};

// Muon (Jordan et al., 2024; torch.optim.Muon). Steps a matrix by its momentum, orthogonalized by Newton and Schulz's
// iteration, which brings all singular values near 1. AdamW steps the other parameters. A parameter of more than 2
// dimensions counts as a matrix: its first dimension is the rows, all others together the columns (Jordan).
//
//   auto others = tessera::GroupRule<MuonOptions>{
//       [](const tessera::NamedShard& p) { return p.sizes.size() < 2 || p.fqn.starts_with("embedding"); },
//       MuonOptions::adamw(3e-4)};
//   tessera::Muon optimizer(fsdp, tessera::group_parameters(fsdp, {others}, MuonOptions(2e-2)));
//
// With a wrapper, one rank orthogonalizes each matrix; costs are balanced over the ranks. That rank receives the parts
// of the momentum from all ranks, and sends back the parts of the result, in bf16 or fp32. While a rank computes one
// matrix, its next matrices are in flight. If parameters are sharded, a rank sends about as many bytes as its part of
// the matrices has, and as many bytes of results. If every rank has all parameters, a rank sends only its 1/N of the
// results to all ranks. Results equal those of one process up to rounding. OSS<Muon> assigns owners by the same costs.
// Momentum is stored where the parameter is. A step allocates twice the memory of this rank's parts of the matrices.
class Muon : public internal::ListedOptimizer<MuonOptions, MuonParamState, internal::Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Takes one step. Throws CommError. Throws std::invalid_argument for tensors that are not dense, and for parameters
  // of fewer than 2 dimensions in a group with use_muon.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Returns the number of multiplications in a parameter's step; 0 for AdamW. Owners are balanced by this number.
  static int64_t step_cost(const NamedShard& parameter, const torch::optim::OptimizerOptions& options);

 private:
  struct Matrix;
  class Rounds;
  Matrix momentum_of(const at::Tensor& parameter, const MuonOptions& options);
  void orthogonalize(std::vector<Matrix>& matrices) const;
  void step_others();
};

// Returns an approximation of U V^T for a matrix U S V^T, [rows, columns], in the matrix's dtype. Uses a quintic
// iteration (3.4445, -4.7750, 2.0315). With 5 steps, singular values above 0.002 of the norm become 0.68 to 1.21. Zeros
// stay zero. Throws std::invalid_argument unless `matrix` has 2 dimensions and a floating-point dtype.
at::Tensor orthogonalized(const at::Tensor& matrix, int64_t ns_steps = 5);

}  // namespace tessera
