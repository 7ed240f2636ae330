// What programs do when a gradient has come, and when a step is over.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Afterwards, all_setups);

bool is_at_owners(const Setup& setup) { return setup.stage == 2; }

// ---- a hook after the gradient

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

TEST_P(Afterwards, AStepInAHookThatComesAfterAccumulation) {
  play(GetParam(), {.expect = Expect::kRefused, .says = kHookAfter, .equal_alone = true, .optimizers = {Optim::kSgd}},
       [](Trainer& run) {
         for (const at::Tensor& parameter : run.model->parameters())
           torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<StepsWhenAccumulated>());
         for (int step = 0; step < 3; ++step) run.loss(step).backward();
       });
}

TEST_P(Afterwards, AScaleInAHookOfTheAccumulator) {
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

// ---- changes after a step

// Under SDP a gradient is at its owner alone, so that nobody else changes what has one.
Play of_what_has_a_gradient(const Setup& setup) {
  if (!is_at_owners(setup)) return {};
  return {.expect = Expect::kRefused, .says = {kByOther[0], "the ranks have diverged"}, .equal_alone = true};
}

TEST_P(Afterwards, DecaysWhatHasAGradient) {
  play(GetParam(), of_what_has_a_gradient(GetParam()), [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      for (at::Tensor& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.data().mul_(0.99);
    }
  });
}

TEST_P(Afterwards, AnotherOptimizerStepsOnceMore) {
  play(GetParam(), of_what_has_a_gradient(GetParam()), [](Trainer& run) {
    torch::optim::SGD second(run.parameters(), torch::optim::SGDOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      second.step();
    }
  });
}

// Alike on all ranks.
TEST_P(Afterwards, ClampsAllParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      for (at::Tensor& parameter : run.parameters()) parameter.data().clamp_(-0.25, 0.25);
      const at::NoGradGuard no_grad;
      if (step == 2)
        for (at::Tensor& parameter : run.parameters()) parameter.mul_(0.9);
    }
  });
}

// ---- a layer of two models

struct SharesALayer : Net {
  explicit SharesALayer(const torch::nn::Linear& layer) : shared(register_module("fc2", layer)) {
    register_module("fc3", own);
    own->to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : own->parameters()) parameter.fill_(0.1);
  }
  at::Tensor forward(const at::Tensor& x) override { return own(shared(x).tanh()); }
  torch::nn::Linear shared, own{kFeatures, kFeatures};
};

// Each has a wrapper and an optimizer. Under SDP a gradient would come to the owner that one optimizer knows.
TEST_P(Afterwards, TwoModelsThatShareALayerInTurns) {
  const bool is_refused = GetParam().stage >= 2;
  play(GetParam(),
       {.expect = is_refused ? Expect::kRefused : Expect::kEqual,
        .unused = true,
        .says = {"is a parameter of another wrapper, too", "is sharded already, by another wrapper"},
        .equal_alone = true},
       [](Trainer& run) {
         const auto other = run.another(std::make_shared<SharesALayer>(mlp_of(*run.model).fc2));
         for (int step = 0; step < 4; ++step) {
           run.train(step);
           other->train(step + 10);
         }
       });
}

TESSERA_LOOPS(AfterwardsReplicated, replicated_setups);

TEST_P(AfterwardsReplicated, TwoModelsThatShareAFrozenLayer) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    for (at::Tensor& parameter : mlp_of(*run.model).fc2->parameters()) parameter.requires_grad_(false);
    const auto other = run.another(std::make_shared<SharesALayer>(mlp_of(*run.model).fc2));
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      other->train(step + 10);
    }
  });
}

TEST_P(AfterwardsReplicated, AModelThatSharesALayerIsEvaluatedAndGoes) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto other = run.another(std::make_shared<SharesALayer>(mlp_of(*run.model).fc2));
    {
      const at::NoGradGuard no_grad;
      run.note(run.loss(10));
      run.note(other->loss(10));
    }
    other.reset();
    three_steps(run);
  });
}

// ---- steps of some ranks alone

// In one unit a rank in the middle has nothing but elements of the layer that is not used.
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

TESSERA_LOOPS(AfterwardsSharded, fsdp_setups);

TEST_P(AfterwardsSharded, StepsOfWhoHasElementsOfWhatIsUsed) {
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
}  // namespace tessera::loops
