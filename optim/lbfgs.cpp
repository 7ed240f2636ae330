#include <tessera/optim/lbfgs.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <tessera/host_results.h>
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"

namespace tessera {
using namespace internal;

void LbfgsOptions::check() const {
  require_option(lr() >= 0, kName, "lr", lr(), "0 or more");
  require_option(max_iter() >= 1, kName, "max_iter", static_cast<double>(max_iter()), "1 or more");
  require_option(max_eval() >= 0, kName, "max_eval", static_cast<double>(max_eval()), "0 or more");
  require_option(history_size() >= 1 && history_size() <= kMostHistory, kName, "history_size",
                 static_cast<double>(history_size()), "1 to 100");
}

// A point of the line search: x + t * direction.
struct Lbfgs::Point {
  double t = 0, loss = 0, slope = 0;  // slope: the inner product of gradient and direction
  at::Tensor gradient;
  double gradient_max = 0, gradient_sum = 0, direction_max = 0;  // maxima and sum of absolute values
};

namespace {

double cubic_minimum(double x1, double f1, double g1, double x2, double f2, double g2, double low, double high) {
  const double d1 = g1 + g2 - 3 * (f1 - f2) / (x1 - x2);
  const double square = d1 * d1 - g1 * g2;
  if (!(square >= 0)) return (low + high) / 2;
  const double d2 = std::sqrt(square);
  const double minimum = x1 <= x2 ? x2 - (x2 - x1) * ((g2 + d2 - d1) / (g2 - g1 + 2 * d2))
                                  : x1 - (x1 - x2) * ((g1 + d2 - d1) / (g1 - g2 + 2 * d2));
  return std::min(std::max(minimum, low), high);
}

}  // namespace

// One call of step(). Vectors are [numel]: the concatenation of this rank's parts of all parameters.
struct Lbfgs::Run {
  Lbfgs& optimizer;
  const LossClosure& closure;
  const LbfgsOptions& options;
  const std::vector<at::Tensor> parameters;  // without frozen parameters
  const at::TensorOptions of_vectors;
  const Owners* owners;
  at::Tensor direction{}, gradient{};
  std::vector<at::Tensor> steps{}, changes{};
  std::vector<std::vector<double>> step_change{}, change_change{};  // steps[i] * changes[j], changes[i] * changes[j]
  int64_t evaluations = 0;

  // -- vectors -----------------------------------------------------------------------------------
  int64_t numel() const {
    int64_t sum = 0;
    for (const at::Tensor& parameter : parameters) sum += parameter.numel();
    return sum;
  }
  // Concatenates part(p) of all parameters p (zeros if undefined), one by one: loads at most one from disk at a time.
  at::Tensor joined(const std::function<at::Tensor(const at::Tensor&)>& part) const {
    at::Tensor whole = at::zeros({numel()}, of_vectors);
    int64_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      if (const at::Tensor values = part(parameter); values.defined())
        whole.narrow(0, offset, parameter.numel()).copy_(values);
      offset += parameter.numel();
    }
    return whole;
  }
  // Returns this rank's share of the inner product. Each part of a parameter is counted by one replica only.
  double product(const at::Tensor& a, const at::Tensor& b) const {
    double sum = 0;
    int64_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      const int64_t numel = parameter.numel();
      if (numel > 0 && optimizer.parts().counts(parameter))
        sum +=
            a.narrow(0, offset, numel).to(at::kDouble).dot(b.narrow(0, offset, numel).to(at::kDouble)).item<double>();
      offset += numel;
    }
    return sum;
  }
  double largest(const at::Tensor& a) const { return a.numel() == 0 ? 0 : a.abs().max().item<double>(); }
  // Combines values over ranks. If ranks hold different elements, replaces `sums` by their sums and `maxima` by their
  // maxima; otherwise all ranks already have equal values. In both cases, averages the loss `mean`, unless it is null.
  void exchange(std::vector<double>& sums, std::vector<double>& maxima, double* mean) const {
    Communicator* comm = owners != nullptr ? owners->comm : optimizer.parts().comm();
    if (comm == nullptr || comm->size() == 1) return;
    std::vector<double> own = sums;
    own.insert(own.end(), maxima.begin(), maxima.end());
    own.push_back(mean != nullptr ? *mean : 0);
    const auto count = static_cast<int64_t>(own.size());
    const at::Tensor mine = at::empty({count}, at::TensorOptions(at::kCPU).dtype(at::kDouble));
    std::ranges::copy(own, mine.mutable_data_ptr<double>());
    const at::Tensor all = gather_to_host(*comm, mine, "inner products for Lbfgs");
    const auto ranks = all.accessor<double, 2>();
    auto over_ranks = [&](int64_t column, bool is_sum) {
      double value = is_sum ? 0 : ranks[0][column];
      for (int rank = 0; rank < comm->size(); ++rank)
        value = is_sum ? value + ranks[rank][column] : std::max(value, ranks[rank][column]);
      return value;
    };
    if (owners != nullptr || optimizer.parts().are_cut()) {
      for (size_t i = 0; i < sums.size(); ++i) sums[i] = over_ranks(static_cast<int64_t>(i), true);
      for (size_t i = 0; i < maxima.size(); ++i) maxima[i] = over_ranks(static_cast<int64_t>(sums.size() + i), false);
    }
    if (mean != nullptr) *mean = over_ranks(count - 1, true) / comm->size();
  }

  void move_to(const at::Tensor& x, double t) const {
    int64_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      const at::Tensor own = in_memory_order(parameter.detach());
      const int64_t numel = own.numel();
      at::Tensor value = x.narrow(0, offset, numel);
      if (t != 0) value = value.add(direction.narrow(0, offset, numel), t);
      own.copy_(value);
      offset += numel;
    }
    if (owners != nullptr) owners->publish();
  }

  // Evaluates the closure at x + t * direction.
  Point evaluate(const at::Tensor& x, double t) {
    move_to(x, t);
    return point_of(loss_of(closure), t);
  }
  // Returns the point at which the closure has just returned `loss`.
  Point point_of(const at::Tensor& loss, double t) {
    if (!loss.defined()) throw std::invalid_argument("Lbfgs: the closure returned no loss");
    ++evaluations;
    for (const at::Tensor& parameter : parameters) require_dense(parameter, "Lbfgs");
    Point point{.t = t, .loss = loss.item<double>()};
    point.gradient = joined([](const at::Tensor& parameter) {
      return parameter.grad().defined() ? in_memory_order(laid_out_as(parameter.grad(), parameter.detach()))
                                        : at::Tensor();
    });
    double absolute_sum = 0;
    int64_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      if (optimizer.parts().counts(parameter))
        absolute_sum += point.gradient.narrow(0, offset, parameter.numel()).abs().sum(at::kDouble).item<double>();
      offset += parameter.numel();
    }
    std::vector<double> sums{absolute_sum, direction.defined() ? product(point.gradient, direction) : 0};
    std::vector<double> maxima{largest(point.gradient), direction.defined() ? largest(direction) : 0};
    exchange(sums, maxima, &point.loss);
    point.gradient_sum = sums[0], point.slope = sums[1];
    point.gradient_max = maxima[0], point.direction_max = maxima[1];
    return point;
  }

  // -- the direction -----------------------------------------------------------------------------
  // Sets the direction. If the last step, `t` times the old direction, has positive curvature, adds this step to the
  // history. Returns the slope along the new direction.
  double choose_direction(double t, bool is_first) {
    std::vector<double> none;
    const at::Tensor g = gradient;
    if (is_first) {
      direction = g.neg();
      std::vector<double> sums{product(g, g)};
      exchange(sums, none, nullptr);
      previous = g;
      return -sums[0];
    }
    const at::Tensor change = g - previous, step = direction * t;
    const size_t known = steps.size();
    std::vector<double> sums{product(step, change), product(change, change), product(step, g), product(change, g),
                             product(g, g)};
    for (size_t i = 0; i < known; ++i)
      for (const double value : {product(step, changes[i]), product(steps[i], change), product(changes[i], change),
                                 product(steps[i], g), product(changes[i], g)})
        sums.push_back(value);
    exchange(sums, none, nullptr);
    std::vector<double> step_g, change_g;
    for (size_t i = 0; i < known; ++i) step_g.push_back(sums[5 + 5 * i + 3]), change_g.push_back(sums[5 + 5 * i + 4]);
    if (sums[0] > 1e-10) {
      for (size_t i = 0; i < known; ++i) {
        step_change[i].push_back(sums[5 + 5 * i + 1]);
        change_change[i].push_back(sums[5 + 5 * i + 2]);
      }
      step_change.emplace_back();
      change_change.emplace_back();
      for (size_t i = 0; i < known; ++i) {
        step_change.back().push_back(sums[5 + 5 * i]);
        change_change.back().push_back(sums[5 + 5 * i + 2]);
      }
      step_change.back().push_back(sums[0]);
      change_change.back().push_back(sums[1]);
      steps.push_back(step), changes.push_back(change);
      step_g.push_back(sums[2]), change_g.push_back(sums[3]);
      if (static_cast<int64_t>(steps.size()) > options.history_size()) {
        auto drop_first = [](auto& list) { list.erase(list.begin()); };
        drop_first(steps), drop_first(changes), drop_first(step_g), drop_first(change_g);
        for (auto* matrix : {&step_change, &change_change}) {
          drop_first(*matrix);
          for (auto& row : *matrix) drop_first(row);
        }
      }
    }
    previous = g;
    return combine(step_g, change_g, sums[4]);
  }

  // Sets the direction by the two-loop recursion, on coefficients instead of vectors: of_g * g + sum(of_steps * steps)
  // + sum(of_changes * changes). The arguments are inner products with the gradient g. Returns the slope.
  double combine(const std::vector<double>& step_g, const std::vector<double>& change_g, double g_g) {
    const size_t count = steps.size();
    std::vector<double> of_steps(count), of_changes(count), alphas(count);
    double of_g = -1;
    for (size_t i = count; i-- > 0;) {
      double inner = of_g * step_g[i];
      for (size_t j = 0; j < count; ++j) inner += of_changes[j] * step_change[i][j];
      alphas[i] = inner / step_change[i][i];
      of_changes[i] -= alphas[i];
    }
    const double scale = count == 0 ? 1 : step_change[count - 1][count - 1] / change_change[count - 1][count - 1];
    of_g *= scale;
    for (double& coefficient : of_changes) coefficient *= scale;
    for (size_t i = 0; i < count; ++i) {
      double inner = of_g * change_g[i];
      for (size_t j = 0; j < count; ++j) inner += of_changes[j] * change_change[i][j] + of_steps[j] * step_change[j][i];
      of_steps[i] += alphas[i] - inner / step_change[i][i];
    }
    direction = gradient * of_g;
    double slope = of_g * g_g;
    for (size_t i = 0; i < count; ++i) {
      direction.add_(steps[i], of_steps[i]).add_(changes[i], of_changes[i]);
      slope += of_steps[i] * step_g[i] + of_changes[i] * change_g[i];
    }
    return slope;
  }

  // -- the line search ---------------------------------------------------------------------------
  static constexpr int kMostEvaluations = 25;

  // The strong Wolfe conditions, relative to the start of a search.
  struct WolfeConditions {
    const Point& start;
    bool is_too_high(const Point& p) const { return p.loss > start.loss + 1e-4 * p.t * start.slope; }
    bool is_flat(const Point& p) const { return std::abs(p.slope) <= -0.9 * start.slope; }
  };

  // An interval of t with a solution: a point that meets both conditions. If `is_met`, ends[low()] is a solution.
  struct Bracket {
    std::array<Point, 2> ends;
    bool is_met = false;
    int evaluations = 0;
    double direction_max = 0;
    int low() const { return ends[0].loss <= ends[1].loss ? 0 : 1; }
  };

  // Extends the step from `t` until a bracket is found. After 25 extensions, returns the start and the last point.
  Bracket bracket(const at::Tensor& x, double t, const WolfeConditions& wolfe) {
    Point before = wolfe.start, now = evaluate(x, t);
    const double direction_max = now.direction_max;
    for (int count = 0; count < kMostEvaluations; ++count) {
      if (wolfe.is_too_high(now) || (count > 1 && now.loss >= before.loss) || (now.slope >= 0 && !wolfe.is_flat(now)))
        return {{before, now}, false, count, direction_max};
      if (wolfe.is_flat(now)) return {{now, now}, true, count, direction_max};
      const double next = cubic_minimum(before.t, before.loss, before.slope, now.t, now.loss, now.slope,
                                        now.t + 0.01 * (now.t - before.t), now.t * 10);
      before = std::move(now);
      now = evaluate(x, next);
    }
    return {{wolfe.start, now}, false, kMostEvaluations, direction_max};
  }

  // Returns a point that meets the conditions, or the best point found. Like torch, uses the line search of minFunc.
  Point search(const at::Tensor& x, double t, const Point& start) {
    const WolfeConditions wolfe{start};
    Bracket found = bracket(x, t, wolfe);
    auto& ends = found.ends;
    bool stalls = false;
    int low = found.low();
    for (int count = found.evaluations; !found.is_met && count < kMostEvaluations; ++count) {
      const auto [least, most] = std::minmax(ends[0].t, ends[1].t);
      if ((most - least) * found.direction_max < options.tolerance_change()) break;
      double next =
          cubic_minimum(ends[0].t, ends[0].loss, ends[0].slope, ends[1].t, ends[1].loss, ends[1].slope, least, most);
      const double margin = 0.1 * (most - least);
      const bool is_close = std::min(most - next, next - least) < margin;
      if (is_close && (stalls || next >= most || next <= least)) {
        next = std::abs(next - most) < std::abs(next - least) ? most - margin : least + margin;
        stalls = false;
      } else {
        stalls = is_close;
      }
      Point now = evaluate(x, next);
      if (wolfe.is_too_high(now) || now.loss >= ends[low].loss) {
        ends[1 - low] = std::move(now);
        low = found.low();
        continue;
      }
      if (wolfe.is_flat(now)) {
        found.is_met = true;
      } else if (now.slope * (ends[1 - low].t - ends[low].t) >= 0) {
        ends[1 - low] = ends[low];
      }
      ends[low] = std::move(now);
    }
    return ends[low];
  }

  // -- states ------------------------------------------------------------------------------------
  // Loads the vectors from the parameters' states. Recomputes the inner products of the history.
  LbfgsParamState load() {
    auto state_of = [&](const at::Tensor& parameter) -> const LbfgsParamState& {
      return optimizer.state_of(parameter);
    };
    // A parameter that was frozen in the last step() has no state, or an older one. Zeros replace its history.
    LbfgsParamState numbers;
    for (const at::Tensor& parameter : parameters)
      if (state_of(parameter).n_iter > numbers.n_iter) numbers = state_of(parameter);
    size_t count = numbers.steps.size();
    if (owners != nullptr) agree(numbers, count);
    if (numbers.n_iter == 0) return numbers;
    auto vector = [&](auto field) {  // joins the parameters' values of a field
      return joined([&](const at::Tensor& parameter) {
        const LbfgsParamState& state = state_of(parameter);
        return state.n_iter == numbers.n_iter ? in_memory_order(laid_out_as(field(state), parameter.detach()))
                                              : at::Tensor();
      });
    };
    direction = vector([](const LbfgsParamState& state) { return state.direction; });
    previous = vector([](const LbfgsParamState& state) { return state.gradient; });
    for (size_t i = 0; i < count; ++i) {
      steps.push_back(vector([i](const LbfgsParamState& state) { return state.steps[i]; }));
      changes.push_back(vector([i](const LbfgsParamState& state) { return state.changes[i]; }));
    }
    std::vector<double> sums, none;
    for (size_t i = 0; i < count; ++i)
      for (size_t j = 0; j < count; ++j)
        sums.push_back(product(steps[i], changes[j])), sums.push_back(product(changes[i], changes[j]));
    exchange(sums, none, nullptr);
    for (size_t i = 0; i < count; ++i) {
      step_change.emplace_back(), change_change.emplace_back();
      for (size_t j = 0; j < count; ++j) {
        step_change[i].push_back(sums[2 * (i * count + j)]);
        change_change[i].push_back(sums[2 * (i * count + j) + 1]);
      }
    }
    return numbers;
  }
  // Sets `numbers` and `count`, the history's length, to the values of the rank whose parameters have the most
  // iterations. The calling rank may have no state: its parameters may all be frozen, or it may own none.
  void agree(LbfgsParamState& numbers, size_t& count) const {
    std::vector<double> none, longest{static_cast<double>(numbers.n_iter)};
    exchange(none, longest, nullptr);
    constexpr double kLeast = -std::numeric_limits<double>::infinity();
    std::vector<double> known(3, kLeast);
    if (static_cast<double>(numbers.n_iter) == longest[0])
      known = {static_cast<double>(numbers.func_evals), numbers.t, static_cast<double>(count)};
    exchange(none, known, nullptr);
    numbers.n_iter = static_cast<int64_t>(longest[0]);
    numbers.func_evals = static_cast<int64_t>(known[0]);
    numbers.t = known[1];
    count = static_cast<size_t>(known[2]);
  }
  // Stores views of the vectors in the states of the parameters, with the parameters' shapes.
  void store(int64_t n_iter, int64_t func_evals, double t) const {
    int64_t offset = 0;
    for (const at::Tensor& parameter : parameters) {
      auto part = [&](const at::Tensor& vector) {
        return vector.narrow(0, offset, parameter.numel())
            .as_strided(parameter.sizes(), parameter.strides(), vector.storage_offset() + offset);
      };
      LbfgsParamState& state = optimizer.state_of(parameter);
      state.n_iter = n_iter, state.func_evals = func_evals, state.t = t;
      state.direction = part(direction), state.gradient = part(previous);
      state.steps.clear(), state.changes.clear();
      for (const at::Tensor& step : steps) state.steps.push_back(part(step));
      for (const at::Tensor& change : changes) state.changes.push_back(part(change));
      offset += parameter.numel();
    }
  }

  at::Tensor previous{};  // gradient at the previous iteration
};

at::Tensor Lbfgs::step(LossClosure closure) { return search(closure, nullptr); }

at::Tensor Lbfgs::step_among(const Owners& owners, const LossClosure& closure) { return search(closure, &owners); }

at::Tensor Lbfgs::search(const LossClosure& closure, const Owners* owners) {
  if (!closure) throw std::invalid_argument("Lbfgs::step(): expected a closure that computes the loss and gradients");
  if (param_groups().size() != 1)
    throw std::invalid_argument(c10::str("Lbfgs: ", param_groups().size(), " groups, expected one"));
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "Lbfgs");
  const LbfgsOptions& options = options_of(param_groups()[0]);
  const at::Tensor first_loss = loss_of(closure);  // must precede requires_grad(): forward updates the shards' flags
  std::vector<at::Tensor> own;
  for (const at::Tensor& parameter : param_groups()[0].params())
    if (parameter.requires_grad()) own.push_back(parameter);
  const std::vector<at::Tensor> trained = owners != nullptr ? owners->trained : own;
  if (trained.empty()) return first_loss;
  for (const at::Tensor& parameter : trained)
    if (parameter.scalar_type() != trained[0].scalar_type() || parameter.device() != trained[0].device())
      throw std::invalid_argument("Lbfgs: parameters of several dtypes or devices, expected one");
  Run run{*this, closure, options, std::move(own), trained[0].options().requires_grad(false), owners};
  Point now = run.point_of(first_loss, 0);
  if (now.gradient_max <= options.tolerance_grad()) return first_loss;
  const LbfgsParamState numbers = run.load();
  int64_t n_iter = numbers.n_iter;
  double t = numbers.t;
  const int64_t most = options.max_eval() > 0 ? options.max_eval() : options.max_iter() * 5 / 4;
  for (int64_t i = 1; i <= options.max_iter(); ++i) {
    const bool is_first = n_iter++ == 0;
    run.gradient = now.gradient;
    now.slope = run.choose_direction(t, is_first);
    t = (is_first ? std::min(1.0, 1.0 / now.gradient_sum) : 1.0) * options.lr();
    if (now.slope > -options.tolerance_change()) break;
    const double loss_before = now.loss;
    const at::Tensor x = run.joined([](const at::Tensor& p) { return in_memory_order(p.detach()); });
    now.t = 0;
    if (options.strong_wolfe()) {
      now = run.search(x, t, now);
      t = now.t;
      run.move_to(x, t);
    } else if (i != options.max_iter()) {
      now = run.evaluate(x, t);
    } else {
      run.move_to(x, t);
      break;
    }
    if (i == options.max_iter() || run.evaluations >= most || now.gradient_max <= options.tolerance_grad() ||
        std::abs(t) * now.direction_max <= options.tolerance_change() ||
        std::abs(now.loss - loss_before) < options.tolerance_change())
      break;
  }
  run.store(n_iter, numbers.func_evals + run.evaluations, t);
  return first_loss;
}

}  // namespace tessera
