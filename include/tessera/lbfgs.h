#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of Lbfgs, each set by a function of its name.
struct LbfgsOptions : ListedOptions<LbfgsOptions> {
  // As checkpoints have it.
  static constexpr const char* kName = "Lbfgs";

  static constexpr int64_t kMostHistory = 100;  // of history_size

  // With this learning rate.
  explicit LbfgsOptions(double lr = 1) : lr_(lr) {}

  TORCH_ARG(double, lr) = 1;                   // the learning rate
  TORCH_ARG(int64_t, max_iter) = 20;           // of one step()
  TORCH_ARG(int64_t, max_eval) = 0;            // of the closure in one step(); 0: 5 / 4 of max_iter
  TORCH_ARG(double, tolerance_grad) = 1e-7;    // see above
  TORCH_ARG(double, tolerance_change) = 1e-9;  // see above
  TORCH_ARG(int64_t, history_size) = 100;      // 1 to 100
  TORCH_ARG(bool, strong_wolfe) = false;       // a line search; else steps of length lr

 public:
  // Throws std::invalid_argument for a value out of its range.
  void check() const;
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    auto visit_count = [&](const char* name, int64_t& field) {
      auto number = static_cast<double>(field);
      visit(name, number);
      field = static_cast<int64_t>(number);
    };
    visit("lr", lr());
    visit_count("max_iter", max_iter());
    visit_count("max_eval", max_eval());
    visit("tolerance_grad", tolerance_grad());
    visit("tolerance_change", tolerance_change());
    visit_count("history_size", history_size());
    visit("strong_wolfe", strong_wolfe());
  }
};

// A parameter's part of the vectors, and the numbers, the same for all parameters.
struct LbfgsParamState : ListedState<LbfgsParamState> {
  int64_t func_evals = 0;           // of the closure
  int64_t n_iter = 0;               // iterations
  double t = 0;                     // length of the last step
  at::Tensor direction;             // of the last step
  at::Tensor gradient;              // before it
  std::vector<at::Tensor> steps;    // of parameters, the oldest first
  std::vector<at::Tensor> changes;  // of gradients with them

  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    visit("func_evals", func_evals);
    visit("n_iter", n_iter);
    auto bits = std::bit_cast<int64_t>(t);  // as its 64 bits
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

// torch::optim::LBFGS (Liu and Nocedal, 1989; strong Wolfe as minFunc has it) for parameters and gradients that are
// split: the direction is a combination of the vectors of the history, whose coefficients need inner products alone,
// so an iteration exchanges 5 doubles for each step that is remembered, at once, and an evaluation 5 (Chen et al.,
// 2014). Losses are averaged over the ranks, so that all take the same steps. Given a wrapper that has the gradients of
// its parts (FullyShardedDataParallel, DistributedDataParallel); one group; equal to torch's to rounding.
//
//   tessera::Lbfgs optimizer(fsdp, tessera::LbfgsOptions(1).strong_wolfe(true));
//   optimizer.step([&] {
//     fsdp.zero_grad();
//     at::Tensor loss = torch::mse_loss(fsdp(x), y);
//     loss.backward();
//     return loss;
//   });
//
// The history takes 2 * history_size times the memory of the parts. OSS<Lbfgs> has that of what a rank owns, and sends
// all parameters from their owners at each point that the search tries.
class Lbfgs : public ListedOptimizer<LbfgsOptions, LbfgsParamState, Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Up to max_iter iterations; returns the closure's first loss, this rank's. Throws std::invalid_argument without a
  // closure, for several groups, and for sparse gradients; CommError.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Of ranks that each have other parameters, whole: OSS's.
  struct Owners {
    Communicator* comm;
    std::vector<at::Tensor> trained;  // those of all ranks that are not frozen
    std::function<void()> publish;    // collective: all ranks get the owners' new values
  };
  // step() over the parameters of all ranks, of which this one owns param_groups()'. Collective.
  at::Tensor step_among(const Owners& owners, const LossClosure& closure);

 private:
  at::Tensor search(const LossClosure& closure, const std::vector<at::Tensor>& trained, const Owners* owners);
  struct Point;
  struct Memory;
  struct Run;
};

}  // namespace tessera
