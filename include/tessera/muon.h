#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Of a group of Muon: of matrices, or, with use_muon(false), of what AdamW steps beside them (adamw()).
struct MuonOptions : ListedBetas<MuonOptions> {
  // As checkpoints have it.
  static constexpr const char* kName = "Muon";

  // With this learning rate.
  explicit MuonOptions(double lr = 1e-3) : ListedBetas(lr, 0.9, 0.95, 0.1) {}
  // A group for embeddings, heads, biases and norms.
  static MuonOptions adamw(double lr) { return MuonOptions(lr).use_muon(false); }

  TORCH_ARG(bool, use_muon) = true;  // else AdamW
  // Of matrices.
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;  // see above
  TORCH_ARG(int64_t, ns_steps) = 5;  // see above
  TORCH_ARG(bool, bfloat16) = true;  // what is exchanged and multiplied; false: fp32
  // Steps are lr * 0.2 * sqrt(max(rows, columns)), so that their size is AdamW's and so may its learning rate be
  // (Moonlight); false: lr * sqrt(max(1, rows / columns)) (Jordan).
  TORCH_ARG(bool, match_rms_adamw) = false;
  TORCH_ARG(double, eps) = 1e-8;  // of the others, as beta1 and beta2: added to the denominator

 public:
  // Throws std::invalid_argument for a value out of its range.
  void check() const;
  // Calls visit(name, value) for each.
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

// What Muon keeps for a parameter.
struct MuonParamState : ListedState<MuonParamState> {
  TORCH_ARG(int64_t, step) = 0;            // steps taken
  TORCH_ARG(at::Tensor, momentum_buffer);  // of a matrix
  TORCH_ARG(at::Tensor, exp_avg);          // of the others
  TORCH_ARG(at::Tensor, exp_avg_sq);       // of their squares

 public:
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    visit("step", step());
    visit("momentum_buffer", momentum_buffer());
    visit("exp_avg", exp_avg());
    visit("exp_avg_sq", exp_avg_sq());
  }
};

// Muon (Jordan et al., 2024; torch.optim.Muon): steps of matrices are their momentum with all singular values brought
// near 1, by Newton and Schulz's iteration; other parameters take AdamW's. A parameter of more than 2 dimensions is the
// matrix of its first by all others, as Jordan has convolutions.
//
//   auto others = tessera::GroupRule<MuonOptions>{
//       [](const tessera::NamedShard& p) { return p.sizes.size() < 2 || p.fqn.starts_with("embedding"); },
//       MuonOptions::adamw(3e-4)};
//   tessera::Muon optimizer(fsdp, tessera::group_parameters(fsdp, {others}, MuonOptions(2e-2)));
//
// Given a wrapper, each matrix is orthogonalised by one rank, chosen by cost, so that ranks finish together: parts of
// the momentum travel to it and parts of the result back, in bf16 or fp32, one matrix a rank at a time, while those
// before are worked on. A rank sends about its part of the matrices, and as much of results (where every rank has all
// parameters, 1/N of the results to all). Equal to one process to rounding. Under OSS<Muon> owners are chosen by the
// same cost. Momentum lies where the parameters lie; a step takes the memory of this rank's parts twice more.
class Muon : public ListedOptimizer<MuonOptions, MuonParamState, Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Throws CommError, and std::invalid_argument for sparse gradients and matrices of fewer than 2 dimensions.
  at::Tensor step(LossClosure closure = nullptr) override;

  // What a step of the parameter costs, as multiplications, 0 where it is AdamW's: what owners are chosen by.
  static int64_t step_cost(const NamedShard& parameter, const torch::optim::OptimizerOptions& options);

 private:
  struct Matrix;
  class Rounds;
  Matrix momentum_of(const at::Tensor& parameter, const MuonOptions& options);
  void orthogonalize(std::vector<Matrix>& matrices) const;
  void step_others();
};

// An approximation of U V^T of a matrix [rows, columns] U S V^T, in its dtype: a quintic iteration with coefficients
// 3.4445, -4.7750 and 2.0315, after which singular values are between 0.7 and 1.2. A matrix of zeros stays one.
at::Tensor orthogonalized(const at::Tensor& matrix, int64_t ns_steps = 5);

}  // namespace tessera
