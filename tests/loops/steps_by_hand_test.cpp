// Steps without OSS, and optimizers of the program.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <map>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::steps_by_hand_test {
using namespace internal;
namespace {

TESSERA_LOOPS(StepsByHand, all_setups);
TESSERA_LOOPS(StepsByHandSharded, fsdp_setups);

// Two groups, a layer that is skipped at first (its momentum begins later), gradients zeroed in place, an evaluation
// after backward, and a skipped step. The one process uses torch's SGD.
TEST_P(StepsByHand, AFusedOptimizerOfOnesOwn) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    std::vector<at::Tensor> parameters = run.parameters();
    const at::Tensor last = parameters.back();
    parameters.pop_back();
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    std::unique_ptr<torch::optim::SGD> optimizer = run.shards() == nullptr
                                                       ? std::make_unique<torch::optim::SGD>(parameters, options)
                                                       : std::make_unique<tessera::SGD>(parameters, options);
    optimizer->add_param_group({{last}, std::make_unique<torch::optim::SGDOptions>(0.01)});
    for (int step = 0; step < 4; ++step) {
      mlp_of(*run.model).skip_fc2 = step == 0;
      optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
      run.loss(step).backward();
      {
        const at::NoGradGuard no_grad;
        run.note(run.loss(step + 10));
      }
      if (step != 2) optimizer->step();
    }
  });
}

TEST_P(StepsByHand, DescentByHand) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.zero_grad();
      run.loss(step).backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.sub_(0.1 * parameter.grad());
    }
  });
}

TEST_P(StepsByHand, DescentByHandThroughTheModulesData) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(),
       {.expect = is_sharded(GetParam()) ? Expect::kRefused : Expect::kEqual, .says = {"is in the wrapper's shards"}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.model->zero_grad();
           run.loss(step).backward();
           for (auto& parameter : run.model->parameters()) parameter.data().sub_(0.1 * parameter.grad());
         }
       });
}

// Sharpness-aware minimization: moves up the gradient, computes the step's gradient there, and moves back.
TEST_P(StepsByHand, StepsFromWhereTheLossIsWorse) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.loss(step).backward();
      const double norm = run.clip_grad_norm_(1e9);
      std::vector<at::Tensor> moves;
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : run.parameters()) {
          moves.push_back(parameter.grad().defined() ? parameter.grad() * (0.05 / norm) : torch::Tensor());
          if (moves.back().defined()) parameter.add_(moves.back());
        }
      }
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      loss.backward();
      run.note(loss.detach());
      {
        const torch::NoGradGuard no_grad;
        size_t i = 0;
        for (auto& parameter : run.parameters()) {
          if (moves[i].defined()) parameter.sub_(moves[i]);
          ++i;
        }
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// If gradients are reduced to owners, other ranks have none to step with.
TEST_P(StepsByHand, AnotherOptimizerHalfWay) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.train(1);
    run.optimizer().zero_grad();
    torch::optim::RMSprop other(run.parameters(), torch::optim::RMSpropOptions(1e-2));
    for (int step = 2; step < 4; ++step) {
      other.zero_grad();
      const at::Tensor loss = run.loss(step);
      loss.backward();
      other.step();
      run.note(loss.detach());
    }
  });
}

// The loop keeps moments in tensors like the wrapper's parameters.
TEST_P(StepsByHand, AnOptimizerWrittenByHand) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    std::vector<at::Tensor> moments;
    for (auto& parameter : run.parameters()) moments.push_back(torch::zeros_like(parameter));
    for (int step = 0; step < 3; ++step) {
      run.loss(step).backward();
      const torch::NoGradGuard no_grad;
      size_t i = 0;
      for (auto& parameter : run.parameters()) {
        at::Tensor& moment = moments[i++];
        if (!parameter.grad().defined()) continue;
        moment.lerp_(parameter.grad(), 0.5);
        parameter.add_(moment.sign(), -0.01);
        parameter.mutable_grad().reset();
      }
    }
  });
}

// Halves the step along the gradient until the loss is lower.
TEST_P(StepsByHand, ALineSearchByHand) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.zero_grad();
      const at::Tensor loss = run.loss(step);
      loss.backward();
      const torch::NoGradGuard no_grad;
      double moved = 0;
      for (double rate = 8; rate > 1e-3; rate /= 2) {
        for (auto& parameter : run.parameters())
          if (parameter.grad().defined()) parameter.add_(parameter.grad(), moved - rate);
        moved = rate;
        if (run.loss(step).item<double>() < loss.item<double>()) break;
      }
      run.note(loss);
    }
  });
}

std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> halves(const std::vector<at::Tensor>& all) {
  const auto middle = all.begin() + static_cast<int64_t>(all.size() / 2);
  return {{all.begin(), middle}, {middle, all.end()}};
}

TEST_P(StepsByHand, TwoOptimizersForTwoHalves) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    const auto [front, back] = halves(run.parameters());
    torch::optim::SGD first(front, torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::RMSprop second(back, 0.01);
    for (int step = 0; step < 4; ++step) {
      run.zero_grad();
      run.loss(step).backward();
      first.step();
      if (step % 2 == 1) second.step();
    }
  });
}

// SGD by hand, which skips empty shards.
void train_by_hand(Trainer& run, bool to_none) {
  for (int step = 0; step < 4; ++step) {
    const at::Tensor loss = run.loss(step);
    run.note(loss.detach());
    loss.backward();
    for (auto& parameter : run.parameters()) {
      if (parameter.numel() == 0 || !parameter.grad().defined()) continue;
      parameter.data().sub_(parameter.grad(), 0.1);
      to_none ? parameter.mutable_grad().reset() : static_cast<void>(parameter.mutable_grad().zero_());
    }
  }
}

TEST_P(StepsByHand, AnOptimizerByHandThatSkipsWhatIsEmpty) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) { train_by_hand(run, /*to_none=*/true); });
}

TEST_P(StepsByHand, AnOptimizerByHandOfFewerNumbersThanRanks) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {.model = [] { return seeded_model<Tiny>(81); }},
       [](Trainer& run) { train_by_hand(run, /*to_none=*/false); });
}

TEST_P(StepsByHand, AnotherOptimizerStepsOnceMore) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    torch::optim::SGD second(run.parameters(), torch::optim::SGDOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      second.step();
    }
  });
}

// In one unit, a rank in the middle holds only elements of `side`, which most steps do not use.
struct WithAWideSide : Net {
  WithAWideSide() {
    register_module("first", first);
    register_module("side", side);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor inner = first(x);
    return last(uses_side ? inner + side(x).tanh().mean(1, true) : inner);
  }
  torch::nn::Linear first{kFeatures, kFeatures}, side{kFeatures, 10 * kFeatures}, last{kFeatures, kFeatures};
  bool uses_side = false;
};

TEST_P(StepsByHandSharded, StepsOfWhoHasElementsOfWhatIsUsed) {
  const Play plays{.model = [] { return seeded_model<WithAWideSide>(77); }};
  const auto descend = [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      dynamic_cast<WithAWideSide&>(*run.model).uses_side = step == 3 || step == 4;
      run.zero_grad();
      run.loss(step).backward();
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : run.parameters())
        if (parameter.grad().defined() && parameter.numel() > 0) parameter.sub_(parameter.grad(), 0.05);
    }
  };
  for (int world : {3, 4}) {
    if (std::ranges::count(GetParam().worlds, world) == 0) continue;
    EXPECT_EQ(outcome_of(GetParam(), plays, descend, world, Optim::kSgd).wrong, "") << world;
  }
}

}  // namespace
}  // namespace tessera::loops::steps_by_hand_test
