#include <tessera/optim/muon.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <stdexcept>

#include "core/layout/partition.h"
#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"

namespace tessera {
using namespace internal;
namespace {

// See Muon::Rounds: number of later rounds whose parts are in flight while a round's matrices are orthogonalized.
constexpr size_t kAhead = 2;
constexpr double kSmallestNorm = 1e-7;

int64_t product(const std::vector<int64_t>& sizes, size_t from) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(from), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

// Returns a parameter as a matrix with sizes[0] rows. `elements` are the parameter's elements in memory order.
at::Tensor as_matrix(const at::Tensor& elements, const NamedShard& shape) {
  return elements.as_strided(shape.sizes, shape.strides).reshape({shape.sizes[0], product(shape.sizes, 1)});
}
at::Tensor as_elements(const at::Tensor& matrix, const NamedShard& shape) {
  at::Tensor laid_out = at::empty_strided(shape.sizes, shape.strides, matrix.options());
  laid_out.copy_(matrix.reshape(shape.sizes));
  return laid_out.as_strided({laid_out.numel()}, {1});
}

double step_scale(const NamedShard& shape, const MuonOptions& options) {
  const auto rows = static_cast<double>(shape.sizes[0]), columns = static_cast<double>(product(shape.sizes, 1));
  return options.match_rms_adamw() ? 0.2 * std::sqrt(std::max(rows, columns))
                                   : std::sqrt(std::max(1.0, rows / columns));
}

}  // namespace

void MuonOptions::check() const {
  ListedBetas::check();
  require_option(momentum() >= 0 && momentum() < 1, kName, "momentum", momentum(), "0 or more and below 1");
  require_option(ns_steps() >= 1 && ns_steps() < 100, kName, "ns_steps", static_cast<double>(ns_steps()), "1 to 99");
  require_option(eps() >= 0, kName, "eps", eps(), "0 or more");
}

at::Tensor orthogonalized(const at::Tensor& matrix, int64_t ns_steps) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  if (matrix.dim() != 2 || !at::isFloatingType(matrix.scalar_type()))
    throw std::invalid_argument(c10::str("orthogonalized: a tensor of shape ", matrix.sizes(), " and type ",
                                         matrix.scalar_type(), ", expected a floating-point matrix"));
  const bool is_tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = is_tall ? matrix.t() : matrix;
  // Sums the squares in higher precision: with a norm that is too small, the iteration diverges.
  x = x / x.norm(2, at::toOpMathType(x.scalar_type())).clamp_min(kSmallestNorm).to(x.scalar_type());
  for (int64_t step = 0; step < ns_steps; ++step) {
    const at::Tensor gram = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, kB, kC), x, kA, 1);
  }
  return is_tall ? x.t() : x;
}

int64_t Muon::step_cost(const NamedShard& parameter, const torch::optim::OptimizerOptions& options) {
  const auto& own = dynamic_cast<const MuonOptions&>(options);
  if (!own.use_muon() || parameter.sizes.size() < 2) return 0;
  const int64_t rows = parameter.sizes[0], columns = product(parameter.sizes, 1);
  const int64_t least = std::min(rows, columns), most = std::max(rows, columns);
  return own.ns_steps() * least * least * (2 * most + least);
}

// One matrix parameter of a step.
struct Muon::Matrix {
  at::Tensor parameter;
  const MuonOptions* options;
  NamedShard shape;
  at::Tensor elements;  // this rank's part in memory order: first the momentum, later the result

  at::ScalarType dtype() const { return options->bfloat16() ? at::kBFloat16 : at::kFloat; }
  at::Tensor orthogonal(const at::Tensor& whole) const {
    return as_elements(orthogonalized(as_matrix(whole, shape), options->ns_steps()), shape);
  }
};

Muon::Matrix Muon::momentum_of(const at::Tensor& parameter, const MuonOptions& options) {
  Matrix matrix{parameter, &options, parts().of(parameter), {}};
  MuonParamState& state = state_of(parameter);
  state.momentum_buffer(state.momentum_buffer().defined() ? laid_out_as(state.momentum_buffer(), parameter)
                                                          : at::zeros_like(parameter));
  state.step(state.step() + 1);
  // A missing gradient counts as 0, as in reductions, because another rank may have a gradient.
  const at::Tensor gradient =
      parameter.grad().defined() ? laid_out_as(parameter.grad(), parameter) : at::zeros_like(parameter);
  const at::Tensor& momentum = state.momentum_buffer();
  momentum.mul_(options.momentum()).add_(gradient, 1 - options.momentum());
  at::Tensor direction = momentum;
  if (options.nesterov()) direction = (momentum * options.momentum()).add_(gradient, 1 - options.momentum());
  matrix.elements = in_memory_order(direction).to(matrix.dtype());
  return matrix;
}

// Note [One matrix for each rank at a time]. Each rank has a list of matrices, the most expensive first. In each round,
// every rank orthogonalizes the next matrix of its list. One all-to-all sends the parts of each matrix to the matrix's
// rank, and another all-to-all returns the results. Parts of later rounds are requested before the work of a round, and
// all results are awaited at the end. So a rank can be up to kAhead rounds ahead of the slowest rank.
class Muon::Rounds {
 public:
  Rounds(Communicator& comm, const ParameterParts& parts, std::vector<Matrix>& matrices)
      : comm_(comm), parts_(parts), matrices_(matrices), self_(comm.rank()) {
    // If dtypes are mixed, sends all matrices in fp32, which represents bf16 exactly.
    const bool all_bfloat16 = std::ranges::all_of(matrices, [](const Matrix& m) { return m.options->bfloat16(); });
    wire_ = wire_.dtype(all_bfloat16 ? at::kBFloat16 : at::kFloat).device(comm.device());
    plan();
  }

  void run() {
    std::deque<Exchange> arriving;
    std::vector<Exchange> leaving;
    for (size_t round = 0; round < rounds_.size(); ++round) {
      for (size_t next = round == 0 ? 0 : round + kAhead; next <= round + kAhead && next < rounds_.size(); ++next)
        arriving.push_back(bring(next));
      Exchange own = std::move(arriving.front());
      arriving.pop_front();
      own.pending.wait();
      leaving.push_back(work(round, own.received));
    }
    for (size_t round = 0; round < rounds_.size(); ++round) take_back(round, leaving[round]);
  }

 private:
  struct Exchange {
    at::Tensor received, sent;
    Pending pending;
  };

  void plan() {
    std::vector<int64_t> costs;
    for (const Matrix& matrix : matrices_) costs.push_back(step_cost(matrix.shape, *matrix.options));
    std::vector<size_t> order(matrices_.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return costs[a] > costs[b]; });
    const Partition owners = partition_greedily(costs, comm_.size());
    std::vector<size_t> length(comm_.size());
    for (const size_t index : order) {
      const size_t round = length[owners.owners[index]]++;
      if (round == rounds_.size()) rounds_.emplace_back(comm_.size(), nullptr);
      rounds_[round][owners.owners[index]] = &matrices_[index];
    }
  }

  Exchange exchange(const std::vector<at::Tensor>& parts_sent, const std::vector<int64_t>& receives,
                    const std::string& what) const {
    std::vector<int64_t> sends;
    for (const at::Tensor& part : parts_sent) sends.push_back(part.defined() ? part.numel() : 0);
    Exchange made{at::empty({std::accumulate(receives.begin(), receives.end(), int64_t{0})}, wire_),
                  at::empty({std::accumulate(sends.begin(), sends.end(), int64_t{0})}, wire_),
                  {}};
    for (int64_t offset = 0, rank = 0; rank < comm_.size(); offset += sends[rank++])
      if (sends[rank] > 0) made.sent.narrow(0, offset, sends[rank]).copy_(parts_sent[rank]);
    made.pending = comm_.all_to_all(made.received, made.sent, receives, sends, what);
    return made;
  }

  // Returns whether rank `from` sends its part of a matrix to rank `to`, which orthogonalizes the matrix. Rank `to`
  // always sends to itself. Another rank sends only if parameters are sharded and if it is in the same replica as `to`.
  bool is_sent(const std::vector<ParameterParts::Held>& held, int from, int to) const {
    return from == to || (parts_.are_cut() && held[from].copy == held[to].copy);
  }

  Exchange bring(size_t round) const {
    std::vector<at::Tensor> sent(comm_.size());
    std::vector<int64_t> receives(comm_.size());
    for (int owner = 0; owner < comm_.size(); ++owner) {
      const Matrix* const matrix = rounds_[round][owner];
      if (matrix == nullptr) continue;
      const auto& held = parts_.by_rank(matrix->parameter);
      if (is_sent(held, self_, owner)) sent[owner] = matrix->elements;
      for (int from = 0; owner == self_ && from < comm_.size(); ++from)
        if (is_sent(held, from, owner)) receives[from] = held[from].range.numel();
    }
    return exchange(sent, receives, "matrices for Muon");
  }

  Exchange work(size_t round, const at::Tensor& received) const {
    std::vector<at::Tensor> sent(comm_.size());
    std::vector<int64_t> receives(comm_.size());
    for (int owner = 0; owner < comm_.size(); ++owner)
      if (const Matrix* const matrix = rounds_[round][owner]) receives[owner] = matrix->shape.held.numel();
    if (const Matrix* const matrix = rounds_[round][self_]) {
      const auto& held = parts_.by_rank(matrix->parameter);
      // Parts arrive in rank order, which equals memory order.
      const at::Tensor result = matrix->orthogonal(received.to(matrix->dtype()));
      for (int to = 0; to < comm_.size(); ++to)
        sent[to] = result.narrow(0, held[to].range.begin, held[to].range.numel());
    }
    return exchange(sent, receives, "orthogonal matrices of Muon");
  }

  void take_back(size_t round, Exchange& own) const {
    own.pending.wait();
    int64_t offset = 0;
    for (Matrix* const matrix : rounds_[round]) {
      if (matrix == nullptr) continue;
      matrix->elements = own.received.narrow(0, offset, matrix->shape.held.numel()).to(matrix->parameter.device());
      offset += matrix->shape.held.numel();
    }
  }

  Communicator& comm_;
  const ParameterParts& parts_;
  std::vector<Matrix>& matrices_;
  const int self_;
  at::TensorOptions wire_;
  std::vector<std::vector<Matrix*>> rounds_;  // [round][rank]; null if the rank has no matrix in the round
};

void Muon::orthogonalize(std::vector<Matrix>& matrices) const {
  Communicator* comm = parts().comm();
  if (comm != nullptr && comm->size() > 1) return Rounds(*comm, parts(), matrices).run();
  for (Matrix& matrix : matrices) matrix.elements = matrix.orthogonal(matrix.elements);
}

void Muon::step_others() {
  std::vector<AdamUpdate> updates;
  for (size_t index = 0; index < param_groups().size(); ++index) {
    const MuonOptions& options = options_of(param_groups()[index]);
    if (options.use_muon()) continue;
    for (const at::Tensor& parameter : param_groups()[index].params()) {
      if (!parameter.grad().defined()) continue;
      MuonParamState& state = state_of(parameter);
      if (!state.exp_avg().defined()) {
        state.exp_avg(at::zeros_like(parameter));
        state.exp_avg_sq(at::zeros_like(parameter));
      }
      state.exp_avg(laid_out_as(state.exp_avg(), parameter));
      state.exp_avg_sq(laid_out_as(state.exp_avg_sq(), parameter));
      state.step(state.step() + 1);
      updates.push_back({.group = index,
                         .rule = {options.lr(), options.beta1(), options.beta2(), options.eps(), options.weight_decay(),
                                  /*amsgrad=*/false, /*is_decoupled=*/true},
                         .step = state.step(),
                         .parameter = parameter,
                         .gradient = laid_out_as(parameter.grad(), parameter),
                         .average = state.exp_avg(),
                         .square = state.exp_avg_sq()});
    }
  }
  fused_adam_update(updates);
}

at::Tensor Muon::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "Muon");
  require_steppable();
  std::vector<at::Tensor> candidates;
  std::vector<const MuonOptions*> options;
  const auto all = all_parameters();
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    if (!all.options[i]->use_muon()) continue;
    candidates.push_back(all.tensors[i]);
    options.push_back(all.options[i]);
  }
  const std::vector<bool> used = parts().have_gradients(candidates);
  for (size_t i = 0; i < candidates.size(); ++i)
    if (const NamedShard shard = parts().of(candidates[i]); used[i] && shard.sizes.size() < 2)
      throw std::invalid_argument(c10::str("Muon: ", shard.fqn.empty() ? "a parameter" : "'" + shard.fqn + "'",
                                           " of shape ", c10::IntArrayRef(shard.sizes),
                                           " is in a group with use_muon, expected 2 dimensions or more: put it in "
                                           "a group of MuonOptions::adamw()"));
  step_others();
  std::vector<Matrix> matrices;
  for (size_t i = 0; i < candidates.size(); ++i)
    if (used[i] && product(parts().of(candidates[i]).sizes, 0) > 0)
      matrices.push_back(momentum_of(candidates[i], *options[i]));
  orthogonalize(matrices);
  for (const Matrix& matrix : matrices) {
    if (matrix.shape.held.numel() == 0) {
      note_write(matrix.parameter);  // other ranks write to this parameter, and ranks compare their writes
      continue;
    }
    const at::Tensor own = in_memory_order(matrix.parameter.detach());
    own.mul_(1 - matrix.options->lr() * matrix.options->weight_decay());
    own.add_(matrix.elements.to(own.scalar_type()), -matrix.options->lr() * step_scale(matrix.shape, *matrix.options));
  }
  return loss;
}

}  // namespace tessera
