// Hooks on parameters and activations.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <algorithm>
#include <future>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::loops::hooks_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Hooks, all_setups);

TEST_P(Hooks, LookingForAnomalies) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {  // libtorch looks up the names of a whole stack for each node
      const torch::autograd::DetectAnomalyGuard look(/*check_nan=*/true);
      run.train(step);
    }
  });
}

struct Looking : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = fc1(x).tanh();
    if (h.requires_grad()) {
      const unsigned position = h.register_hook([this](const at::Tensor& gradient) {
        ++seen;
        return gradient * 0.5;
      });
      if (seen == 1) h.remove_hook(position);
      h.retain_grad();
      kept = h;
    }
    return fc3(fc2(h).tanh());
  }
  int seen = 0;
  at::Tensor kept;
};

TEST_P(Hooks, HooksThatAreTakenAwayAndGradientsThatAreKept) {
  play(GetParam(), {.model = [] { return seeded_model<Looking>(44); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.note(dynamic_cast<Looking&>(*run.model).kept.grad().sum());
    }
  });
}

TEST_P(Hooks, AHookOnAParameterIsTakenAway) {
  play(GetParam(), {.expect = is_sharded(GetParam()) ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    const at::Tensor weight = mlp_of(*run.model).fc2->weight;
    const unsigned position = weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
    run.train(0);
    weight.remove_hook(position);
    for (int step = 1; step < 3; ++step) run.train(step);
  });
}

struct StepsWhenAccumulated : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    if (!parameter.grad().defined()) return;
    const at::NoGradGuard no_grad;
    parameter.sub_(parameter.grad() * 0.1);
    parameter.mutable_grad().reset();
  }
};

struct HalvesWhenAccumulated : torch::autograd::FunctionPostHook {
  explicit HalvesWhenAccumulated(at::Tensor leaf) : parameter(std::move(leaf)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
    return outputs;
  }
  const at::Tensor parameter;
};

const std::vector<std::string> kHookAfter{"has a hook that runs when its gradient has been accumulated",
                                          "is in the wrapper's shards"};

TEST_P(Hooks, AStepInAHookThatComesAfterAccumulation) {
  play(GetParam(), {.expect = Expect::kRefused, .says = kHookAfter, .equal_alone = true, .optimizers = {Optim::kSgd}},
       [](Trainer& run) {
         for (const at::Tensor& parameter : run.model->parameters())
           torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<StepsWhenAccumulated>());
         for (int step = 0; step < 3; ++step) run.loss(step).backward();
       });
}

TEST_P(Hooks, AScaleInAHookOfTheAccumulator) {
  play(GetParam(), {.expect = Expect::kRefused, .says = kHookAfter, .equal_alone = true, .optimizers = {Optim::kSgd}},
       [](Trainer& run) {
         std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;  // which a parameter does not keep
         for (const at::Tensor& parameter : run.model->parameters()) {
           accumulators.push_back(torch::autograd::impl::grad_accumulator(parameter));
           accumulators.back()->add_post_hook(std::make_unique<HalvesWhenAccumulated>(parameter));
         }
         three_steps(run);
       });
}

// A hook on an activation that needs a weight, through a view of it taken in forward.
struct HookWithWeight : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = fc1(x).tanh();
    const at::Tensor seen = fc2->weight.detach().t();
    if (h.requires_grad()) h.register_hook([seen](const at::Tensor& gradient) { return gradient + 0.01 * seen.sum(); });
    return fc3(fc2(h).tanh());
  }
};

TEST_P(Hooks, AHookThatUsesAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<HookWithWeight>(35); }, .same_data = true}, three_steps);
}

TEST_P(Hooks, HookOnAModuleParameter) {
  play(GetParam(), {}, [](Trainer& run) {
    mlp_of(*run.model).fc2->weight.register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Hooks, HookOnAModuleParameterBeforeWrapping) {
  auto hooked = [] {
    Model model = mlp();
    mlp_of(*model).fc2->weight.register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
    return model;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = hooked}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// A shard is no part of the graph, so its hook would never be called.
TEST_P(Hooks, HookOnAWrappersParameter) {
  play(GetParam(),
       {.expect = GetParam().stage == 3 ? Expect::kRefused : Expect::kEqual, .says = {"a hook on its shard"}},
       [](Trainer& run) {
         run.train(0);
         run.parameters()[2].register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
         for (int step = 1; step < 3; ++step) run.train(step);
       });
}

}  // namespace
}  // namespace tessera::loops::hooks_test
