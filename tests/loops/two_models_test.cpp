// Several wrapped models.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <map>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::two_models_test {
using namespace internal;
namespace {

TESSERA_LOOPS(TwoModels, all_setups);
TESSERA_LOOPS(TwoModelsReplicated, replicated_setups);

TEST_P(TwoModels, OneOfTwoModelsWaitsForTheOther) {
  play(GetParam(), {}, [](Trainer& run) {
    auto decoder = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      {
        const ScopeExit alone = decoder->no_sync();
        const at::Tensor loss = torch::mse_loss((*decoder)(run(run.x(2 * step))), run.y(2 * step));
        run.note(loss.detach());
        loss.backward();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
      torch::mse_loss((*decoder)(run(run.x(2 * step + 1))), run.y(2 * step + 1)).backward();
      run.optimizer().step();
      decoder->optimizer().step();
      run.optimizer().zero_grad();
      decoder->optimizer().zero_grad();
    }
    run.note_state(*decoder);
  });
}

// Frozen, wrapped, evaluated with and without a graph; then trained.
TEST_P(TwoModels, ATeacherThatIsFrozenAndTrainedInTheEnd) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto teacher = run.another(another_mlp());
    set_frozen(*teacher->model, true);
    for (int step = 0; step < 4; ++step) {
      at::Tensor wanted;
      {
        const torch::AutoGradMode mode(step % 2 == 0);
        wanted = (*teacher)(run.x(step)).detach();
      }
      step_with(run, torch::mse_loss(run(run.x(step)), wanted) + torch::mse_loss(run(run.x(step)), run.y(step)));
    }
    set_frozen(*teacher->model, false);
    teacher->train(5);
    run.note_state(*teacher);
  });
}

// SimSiam: two views, each with a predictor whose target is detached.
TEST_P(TwoModels, TwoViewsAndAPredictor) {
  play(GetParam(), {}, [](Trainer& run) {
    auto predictor = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor a = run(run.x(step)), b = run(run.x(step) + 0.1 * run.y(step));
      const at::Tensor pa = (*predictor)(a), pb = (*predictor)(b);
      const at::Tensor loss = torch::mse_loss(pa, b.detach()) + torch::mse_loss(pb, a.detach());
      step_with(run, loss);
      predictor->optimizer().step();
      predictor->optimizer().zero_grad();
    }
    run.note_state(*predictor);
  });
}

// The critic is trained first. The actor's loss is computed through the critic, whose gradients are then dropped.
TEST_P(TwoModels, ACriticThatWaitsWhileTheActorLearnsThroughIt) {
  play(GetParam(), {}, [](Trainer& run) {
    auto critic = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      at::Tensor wanted;
      {
        const torch::NoGradGuard no_grad;
        wanted = run.y(step) + 0.5 * (*critic)(run(run.x(step)));
      }
      step_with(*critic, torch::mse_loss((*critic)(run.x(step)), wanted));
      {
        const ScopeExit alone = critic->no_sync();
        step_with(run, (*critic)(run(run.x(step))).mean());
      }
      critic->optimizer().zero_grad();
    }
    for (double each : critic->notes) run.notes.push_back(each);
    run.note_state(*critic);
  });
}

struct Nothing : Net {
  Nothing() { empty = register_parameter("empty", torch::zeros({0, kFeatures})); }
  at::Tensor forward(const at::Tensor& x) override { return x.tanh() + empty.sum(0); }
  at::Tensor empty;
};
struct None : Net {
  at::Tensor forward(const at::Tensor& x) override { return x.tanh(); }
};

TEST_P(TwoModels, AModelOfNothingBeforeOneOfSomething) {
  play(GetParam(), {}, [](Trainer& run) {
    auto first = run.another(seeded_model<Nothing>(85));
    for (int step = 0; step < 3; ++step) {
      step_with(run, torch::mse_loss(run((*first)(run.x(step))), run.y(step)));
      first->optimizer().step();
      first->optimizer().zero_grad();
    }
  });
}

TEST_P(TwoModels, AModelWithoutParametersBeforeOneWithSome) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    auto first = run.another(seeded_model<None>(86));
    for (int step = 0; step < 3; ++step) step_with(run, torch::mse_loss(run((*first)(run.x(step))), run.y(step)));
  });
}

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

// Each has a wrapper and an optimizer. Under ShardedDataParallel, the first wrapper's owners differ from the second's.
Play two_wrappers_of_one_parameter(const Setup& setup) {
  return {.expect = setup.stage >= 2 ? Expect::kRefused : Expect::kEqual,
          .unused = true,
          .says = {"is sharded already, by another wrapper", "has a gradient of a forward through another wrapper"},
          .equal_alone = true};
}

TEST_P(TwoModels, TwoModelsThatShareALayerInTurns) {
  play(GetParam(), two_wrappers_of_one_parameter(GetParam()), [](Trainer& run) {
    const auto other = run.another(std::make_shared<SharesALayer>(mlp_of(*run.model).fc2));
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      other->train(step + 10);
    }
  });
}

struct Holds : Net {
  explicit Holds(Model model) : inner(register_module("inner", std::move(model))) { register_module("fc1", head); }
  at::Tensor forward(const at::Tensor& x) override { return inner->forward(head(x).tanh()); }
  Model inner;
  torch::nn::Linear head{kFeatures, kFeatures};
};

// The outer model is trained. Its optimizer has the parameters of the inner one, too.
TEST_P(TwoModels, AModelAroundAWrappedOne) {
  play(GetParam(), two_wrappers_of_one_parameter(GetParam()), [](Trainer& run) {
    const auto outer = run.another(seeded(3, [&]() -> Model {
      auto model = std::make_shared<Holds>(run.model);
      model->head->to(at::kDouble);
      return model;
    }));
    for (int step = 0; step < 3; ++step) outer->train(step);
    run.note_state(*outer);
  });
}

TEST_P(TwoModelsReplicated, TwoModelsThatShareAFrozenLayer) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    for (at::Tensor& parameter : mlp_of(*run.model).fc2->parameters()) parameter.requires_grad_(false);
    const auto other = run.another(std::make_shared<SharesALayer>(mlp_of(*run.model).fc2));
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      other->train(step + 10);
    }
  });
}

TEST_P(TwoModelsReplicated, AModelThatSharesALayerIsEvaluatedAndGoes) {
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

TEST_P(TwoModels, TwoModelsTrainedInTurn) {
  play(GetParam(), {}, [](Trainer& run) {
    auto other = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      run.train(2 * step);
      other->train(2 * step + 1);
    }
    run.note_state(*other);
  });
}

TEST_P(TwoModels, TwoModelsWithTheirForwardsBeforeTheirBackwards) {
  play(GetParam(), {}, [](Trainer& run) {
    auto other = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      other->optimizer().zero_grad();
      at::Tensor first = run.loss(step), second = other->loss(step);
      first.backward();
      second.backward();
      other->optimizer().step();
      run.optimizer().step();
    }
    run.note_state(*other);
  });
}

TEST_P(TwoModels, OneLossOfTwoModels) {
  play(GetParam(), {}, [](Trainer& run) {
    auto decoder = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      decoder->optimizer().zero_grad();
      torch::mse_loss((*decoder)(run(run.x(step))), run.y(step)).backward();
      run.optimizer().step();
      decoder->optimizer().step();
    }
    run.note_state(*decoder);
  });
}

// The generator's backward reaches the discriminator, whose gradients are dropped.
void train_gan(Trainer& generator, bool freeze) {
  auto judge = generator.another(another_mlp());
  auto set_frozen = [&](bool frozen) {
    if (!freeze) return;
    for (auto& parameter : judge->model->parameters()) parameter.requires_grad_(!frozen);
  };
  for (int step = 0; step < 4; ++step) {
    judge->optimizer().zero_grad();
    const at::Tensor made = generator(generator.x(step));
    at::Tensor loss = ((*judge)(generator.y(step)) - 1).square().mean() + (*judge)(made.detach()).square().mean();
    generator.note(loss.detach());
    loss.backward();
    judge->optimizer().step();

    generator.optimizer().zero_grad();
    set_frozen(true);
    loss = ((*judge)(made)-1).square().mean();
    generator.note(loss.detach());
    loss.backward();
    set_frozen(false);
    generator.optimizer().step();
  }
  generator.note_state(*judge);
}

TEST_P(TwoModels, AdversarialPair) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped},
       [](Trainer& run) { train_gan(run, false); });
}

TEST_P(TwoModels, AdversarialPairThatFreezesTheJudge) {
  play(GetParam(), {.unused = true}, [](Trainer& run) { train_gan(run, true); });
}

}  // namespace
}  // namespace tessera::loops::two_models_test
