#include <tessera/optim/adafactor.h>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tessera/host_results.h>
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"
#include "optim/state/optimizer_state.h"

namespace tessera {
using namespace internal;
namespace {

constexpr int64_t kChunkNumel = int64_t{1} << 20;

double epsilon_of(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "Adafactor",
                                         [] { return static_cast<double>(std::numeric_limits<scalar_t>::epsilon()); });
}

double sum_of_squares(const at::Tensor& values) { return values.to(at::kDouble).square().sum().item<double>(); }

}  // namespace

void AdafactorOptions::check() const {
  ListedDecay::check();
  require_option(beta2_decay() <= 0, kName, "beta2_decay", beta2_decay(), "0 or less");
  require_option(eps1() >= 0, kName, "eps1", eps1(), "0 or more");
  require_option(eps2() >= 0, kName, "eps2", eps2(), "0 or more");
  require_option(clip_threshold() >= 1, kName, "clip_threshold", clip_threshold(), "1 or more");
}

// This rank's part of one parameter in a step. Elements are in memory order. Sums over ranks include it if `counts`.
struct Adafactor::Work {
  const AdafactorOptions* options;
  AdafactorParamState* state;
  NamedShard shape;
  bool counts;
  int64_t whole_numel;
  at::Tensor parameter, gradient;  // [shape.held.numel()]
  at::Tensor row_means{};          // [number of matrices]: mean of exp_avg_sq_row over the rows of each matrix

  bool is_matrix() const { return shape.sizes.size() >= 2; }
  double share() const { return std::pow(static_cast<double>(state->step()), options->beta2_decay()); }
  void in_chunks(const std::function<void(Range)>& visit) const {
    for (int64_t begin = 0; begin < shape.held.numel(); begin += kChunkNumel)
      visit({begin, std::min(begin + kChunkNumel, shape.held.numel())});
  }
  at::Tensor squares(Range range) const {
    return gradient.narrow(0, range.begin, range.numel()).to(at::kDouble).square();
  }
  // For each element of `range`, returns the index of its entry in exp_avg_sq_row if `of_rows`, else in exp_avg_sq_col.
  at::Tensor places(Range range, bool of_rows) const {
    const at::Tensor positions = at::arange(shape.held.begin + range.begin, shape.held.begin + range.end,
                                            at::TensorOptions().dtype(at::kLong).device(parameter.device()));
    at::Tensor places = at::zeros_like(positions);
    const size_t dropped = shape.sizes.size() - (of_rows ? 1 : 2);
    int64_t stride = 1;
    for (size_t d = shape.sizes.size(); d-- > 0;) {
      if (d == dropped) continue;
      places.add_(positions.div(shape.strides[d], "floor").remainder(shape.sizes[d]), stride);
      stride *= shape.sizes[d];
    }
    return places;
  }
  // Divides the gradient by the square root of its averaged squares. The result has the dtype of these averages.
  at::Tensor direction(Range range) const {
    at::Tensor average;
    if (is_matrix()) {
      const at::Tensor rows = places(range, true);
      average = state->exp_avg_sq_row().index_select(0, rows);
      average.mul_(state->exp_avg_sq_col().index_select(0, places(range, false)));
      const int64_t rows_of_matrix = shape.sizes[shape.sizes.size() - 2];
      average.div_(row_means.index_select(0, rows.div(rows_of_matrix, "floor")));
    } else {
      average = in_memory_order(state->exp_avg_sq()).narrow(0, range.begin, range.numel()).clone();
    }
    const double least = eps1();
    return average.clamp_min_(least * least).rsqrt_().mul_(gradient.narrow(0, range.begin, range.numel()));
  }
  // Applies the step. Each argument is a sum of squares over all elements, including those of other ranks.
  void change(double parameter_squares, double direction_squares) const {
    const auto numel = static_cast<double>(whole_numel);
    const double step_size = std::min(options->lr(), 1 / std::sqrt(static_cast<double>(state->step())));
    const double alpha = step_size * std::max(options->eps2(), std::sqrt(parameter_squares / numel));
    const double direction_size = std::sqrt(direction_squares / numel);
    const double divisor = std::max(1.0, direction_size / options->clip_threshold());
    in_chunks([&](Range range) {
      const at::Tensor own = parameter.narrow(0, range.begin, range.numel());
      if (options->weight_decay() != 0) own.mul_(1 - options->lr() * options->weight_decay());
      own.add_(direction(range).to(own.scalar_type()), -alpha / divisor);
    });
  }
  double eps1() const { return options->eps1() > 0 ? options->eps1() : epsilon_of(parameter.scalar_type()); }
};

void Adafactor::sum_over_ranks(at::Tensor& sums, const char* what) const {
  if (parts().are_cut()) sums = reduce_to_host(*parts().comm(), sums, ReduceOp::kSum, what);
}

// Sums squares over all ranks in one all-reduce: the gradients' by row and column, and the parameters'. Updates the
// states with the mean squares of the gradients. Appends each parameter's sum of squares to `parameter_squares`.
void Adafactor::average_squares(std::vector<Work>& all, std::vector<double>& parameter_squares) const {
  int64_t numel = static_cast<int64_t>(all.size());
  for (const Work& work : all)
    if (work.is_matrix()) numel += work.state->exp_avg_sq_row().numel() + work.state->exp_avg_sq_col().numel();
  at::Tensor sums = at::zeros({numel}, at::TensorOptions(at::kCPU).dtype(at::kDouble));
  auto offset = static_cast<int64_t>(all.size());
  auto next = [&](int64_t count) { return sums.narrow(0, std::exchange(offset, offset + count), count); };
  for (size_t i = 0; i < all.size(); ++i) {
    const Work& work = all[i];
    if (work.counts) sums[static_cast<int64_t>(i)].fill_(sum_of_squares(work.parameter));
    if (!work.is_matrix()) continue;
    for (const bool of_rows : {true, false}) {
      const at::Tensor& state = of_rows ? work.state->exp_avg_sq_row() : work.state->exp_avg_sq_col();
      at::Tensor own = at::zeros({state.numel()}, state.options().dtype(at::kDouble));
      if (work.counts)
        work.in_chunks([&](Range range) { own.index_add_(0, work.places(range, of_rows), work.squares(range)); });
      next(state.numel()).copy_(own);
    }
  }
  sum_over_ranks(sums, "rows and columns for Adafactor");
  offset = static_cast<int64_t>(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    Work& work = all[i];
    parameter_squares.push_back(sums[static_cast<int64_t>(i)].item<double>());
    if (!work.is_matrix()) {
      const at::Tensor average = in_memory_order(work.state->exp_avg_sq());
      const at::Tensor gradient = work.gradient.to(average.scalar_type());
      average.mul_(1 - work.share()).addcmul_(gradient, gradient, work.share());
      continue;
    }
    const auto& sizes = work.shape.sizes;
    for (const bool of_rows : {true, false}) {
      const at::Tensor& state = of_rows ? work.state->exp_avg_sq_row() : work.state->exp_avg_sq_col();
      const auto count = static_cast<double>(sizes[sizes.size() - (of_rows ? 1 : 2)]);
      const at::Tensor mean = (next(state.numel()) / count).to(state.options());
      state.mul_(1 - work.share()).add_(mean, work.share());
    }
    work.row_means = work.state->exp_avg_sq_row().view({-1, sizes[sizes.size() - 2]}).mean(1).clamp_min_(work.eps1());
  }
}

at::Tensor Adafactor::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "Adafactor");
  require_steppable();
  const auto [parameters, options] = all_parameters();
  const std::vector<bool> used = parts().have_gradients(parameters);
  std::vector<Work> all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    const NamedShard shape = parts().of(parameter);
    const int64_t numel = c10::multiply_integers(shape.sizes);
    if (!used[i] || numel == 0) continue;
    AdafactorParamState& state = state_of(parameter);
    const auto averages = parameter.options().requires_grad(false).dtype(at::toOpMathType(parameter.scalar_type()));
    if (shape.sizes.size() >= 2 && !state.exp_avg_sq_row().defined()) {
      state.exp_avg_sq_row(at::zeros(state_sizes("exp_avg_sq_row", shape.sizes), averages));
      state.exp_avg_sq_col(at::zeros(state_sizes("exp_avg_sq_col", shape.sizes), averages));
    } else if (shape.sizes.size() < 2 && !state.exp_avg_sq().defined()) {
      state.exp_avg_sq(at::zeros_like(parameter, averages));
    }
    state.step(state.step() + 1);
    const at::Tensor own = in_memory_order(parameter.detach());
    all.push_back({options[i], &state, shape, parts().counts(parameter), numel, own,
                   parameter.grad().defined() ? in_memory_order(laid_out_as(parameter.grad(), parameter.detach()))
                                              : at::zeros_like(own)});
  }
  if (all.empty()) return loss;
  std::vector<double> parameter_squares;
  average_squares(all, parameter_squares);
  at::Tensor direction_squares =
      at::zeros({static_cast<int64_t>(all.size())}, at::TensorOptions(at::kCPU).dtype(at::kDouble));
  for (size_t i = 0; i < all.size(); ++i) {
    double sum = 0;
    if (all[i].counts) all[i].in_chunks([&](Range range) { sum += sum_of_squares(all[i].direction(range)); });
    direction_squares[static_cast<int64_t>(i)].fill_(sum);
  }
  sum_over_ranks(direction_squares, "norms of directions for Adafactor");
  for (size_t i = 0; i < all.size(); ++i)
    all[i].change(parameter_squares[i], direction_squares[static_cast<int64_t>(i)].item<double>());
  return loss;
}

}  // namespace tessera
