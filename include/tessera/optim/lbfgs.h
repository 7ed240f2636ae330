#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Lbfgs; each field has a setter of its name.
struct LbfgsOptions : internal::ListedOptions<LbfgsOptions> {
  static constexpr const char* kName = "Lbfgs";  // name in checkpoints

  static constexpr int64_t kMostHistory = 100;  // upper bound of history_size

  explicit LbfgsOptions(double lr = 1) : lr_(lr) {}  // `lr`: the learning rate

  TORCH_ARG(double, lr) = 1;                 // the learning rate
  TORCH_ARG(int64_t, max_iter) = 20;         // upper limit of iterations in one step()
  TORCH_ARG(int64_t, max_eval) = 0;          // limit of closure calls, checked once per iteration; 0: 5 / 4 of max_iter
  TORCH_ARG(double, tolerance_grad) = 1e-7;  // stops if no absolute value of the gradient is above this
  TORCH_ARG(double, tolerance_change) = 1e-9;  // stops if the loss or the parameters change by less than this
  TORCH_ARG(int64_t, history_size) = 100;      // number of remembered steps, 1 to 100
  TORCH_ARG(bool, strong_wolfe) = false;       // true: line search; false: steps of length lr

 public:
  void check() const;  // throws std::invalid_argument if a value is out of range
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    visit("lr", lr());
    internal::visit_whole_number(visit, "max_iter", max_iter());
    internal::visit_whole_number(visit, "max_eval", max_eval());
    visit("tolerance_grad", tolerance_grad());
    visit("tolerance_change", tolerance_change());
    internal::visit_whole_number(visit, "history_size", history_size());
    visit("strong_wolfe", strong_wolfe());
  }
};

// Lbfgs's state of one parameter: its parts of the search's vectors, and numbers that all parameters have in common.
struct LbfgsParamState : internal::ListedState<LbfgsParamState> {
  int64_t func_evals = 0;           // closure calls in all step() calls
  int64_t n_iter = 0;               // iterations in all step() calls
  double t = 0;                     // length of the last step, in multiples of `direction`
  at::Tensor direction;             // direction of the last step
  at::Tensor gradient;              // gradient before the last step
  std::vector<at::Tensor> steps;    // changes of the parameter, oldest first
  std::vector<at::Tensor> changes;  // changes of the gradient, one for each of `steps`

  // Calls visit(name, value) for each field.
  void visit(auto visit) {
    visit("func_evals", func_evals);
    visit("n_iter", n_iter);
    auto bits = std::bit_cast<int64_t>(t);  // checkpoints store this double as the integer with the same bits
    visit("t_bits", bits);
    t = std::bit_cast<double>(bits);
    visit("direction", direction);
    visit("gradient", gradient);
    for (auto* list : {&steps, &changes}) {
      list->resize(LbfgsOptions::kMostHistory);
      for (size_t i = 0; i < list->size(); ++i) {
        std::string name(1, list == &steps ? 's' : 'y');
        name += std::to_string(i);
        visit(name.c_str(), (*list)[i]);
      }
      while (!list->empty() && !list->back().defined()) list->pop_back();
    }
  }
};

// torch::optim::LBFGS (Liu and Nocedal, 1989; strong Wolfe as in minFunc) for sharded parameters and gradients. The
// direction is a combination of the history's vectors, whose coefficients need only inner products (Chen et al., 2014).
// For n remembered steps, ranks all-gather only about 5 n doubles an iteration, 5 a closure call, and 2 n^2 a step().
// Losses are averaged over the ranks, so all ranks take equal steps. Requires one group, and a wrapper that has the
// gradients of its shards (FullyShardedDataParallel, DistributedDataParallel). Results equal torch's up to rounding.
//
//   tessera::Lbfgs optimizer(fsdp, tessera::LbfgsOptions(1).strong_wolfe(true));
//   optimizer.step([&] {
//     fsdp.zero_grad();
//     at::Tensor loss = torch::mse_loss(fsdp(x), y);
//     loss.backward();
//     return loss;
//   });
//
// The history takes 2 * history_size times the memory of the rank's shards (under OSS<Lbfgs>: of the parameters that
// the rank owns). OSS<Lbfgs> publishes all parameters at each point of the search.
class Lbfgs : public internal::ListedOptimizer<LbfgsOptions, LbfgsParamState, internal::Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Runs up to max_iter iterations. Returns this rank's loss in the first call of the closure. Throws CommError. Throws
  // std::invalid_argument without a closure, for several groups, dtypes or devices, and for sparse gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  // For OSS, where each parameter is owned whole by one rank: the group, and the trained parameters of all ranks.
  struct Owners {
    Communicator* comm;
    std::vector<at::Tensor> trained;  // parameters of all ranks, without frozen ones
    std::function<void()> publish;    // collective: sends the owners' new values to all ranks
  };
  // Runs step() over the parameters of all ranks. This rank owns the parameters in param_groups(). Collective.
  at::Tensor step_among(const Owners& owners, const LossClosure& closure);

 private:
  at::Tensor search(const LossClosure& closure, const Owners* owners);
  struct Point;
  struct Memory;
  struct Run;
};

}  // namespace tessera
