// Whole programs: several models, schedules, losses over unequal parts.
#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Programs, all_setups);

TEST_P(Programs, TwoModelsTrainedInTurn) {
  play(GetParam(), {}, [](Trainer& run) {
    auto other = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      run.train(2 * step);
      other->train(2 * step + 1);
    }
    run.note_state(*other);
  });
}

TEST_P(Programs, TwoModelsWithTheirForwardsBeforeTheirBackwards) {
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

TEST_P(Programs, OneLossOfTwoModels) {
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

// The generator's loss goes backward through the discriminator, whose gradients of that are thrown away.
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

TEST_P(Programs, AdversarialPair) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped},
       [](Trainer& run) { train_gan(run, false); });
}

TEST_P(Programs, AdversarialPairThatFreezesTheJudge) {
  play(GetParam(), {.unused = true}, [](Trainer& run) { train_gan(run, true); });
}

TEST_P(Programs, ClippedGradients) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      run.note(torch::tensor(run.clip_grad_norm_(0.1), at::kDouble));
      run.optimizer().step();
    }
  });
}

TEST_P(Programs, ClippedGradientsAfterNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      {
        auto scope = run.no_sync();
        run.loss(2 * step).backward();
      }
      run.loss(2 * step + 1).backward();
      run.note(torch::tensor(run.clip_grad_norm_(0.1), at::kDouble));
      run.optimizer().step();
    }
  });
}

// The norm would be that of a rank's own sums.
TEST_P(Programs, ClippedGradientsAfterNoSyncAlone) {
  play(GetParam(),
       {.expect = Expect::kRefused,
        .says = {"was made under no_sync() and has not been reduced", "is this rank's own sum"},
        .equal_alone = true},
       [](Trainer& run) {
         run.train(0);
         run.optimizer().zero_grad();
         {
           auto scope = run.no_sync();
           run.loss(1).backward();
         }
         run.note(torch::tensor(run.clip_grad_norm_(0.1), at::kDouble));
       });
}

// Where each rank has parts, or only owners have gradients, torch's own function sees this rank's norm.
void play_clipped_by_torch(const Setup& setup, const std::function<std::vector<at::Tensor>(Trainer&)>& parameters) {
  play(setup,
       {.expect = setup.stage >= 2 ? Expect::kRefused : Expect::kEqual,
        .says = {"is in the wrapper's shards", "would be scaled by a tensor that may come from its norm"},
        .equal_alone = true},
       [&](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           run.loss(step).backward();
           torch::nn::utils::clip_grad_norm_(parameters(run), 0.1);
           run.optimizer().step();
         }
       });
}

TEST_P(Programs, ClippedByTorchsFunctionOnTheModule) {
  play_clipped_by_torch(GetParam(), [](Trainer& run) { return run.model->parameters(); });
}

// What a user of a wrapper is told to give to an optimizer.
TEST_P(Programs, ClippedByTorchsFunctionOnTheWrappersParameters) {
  play_clipped_by_torch(GetParam(), [](Trainer& run) { return run.parameters(); });
}

// Norms looked at and gradients scaled, by what has nothing to do with a norm, are the user's business.
TEST_P(Programs, GradientsLookedAtAndScaled) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (const at::Tensor& parameter : run.parameters()) {
        if (!parameter.grad().defined()) continue;
        EXPECT_GE(parameter.grad().norm().item<double>(), 0);
        parameter.mutable_grad().mul_(0.5);
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (const at::Tensor& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(torch::tensor(0.5, torch::kDouble));
      run.optimizer().step();
    }
  });
}

TEST_P(Programs, ScheduledLearningRate) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 5; ++step) {
      for (auto& group : run.optimizer().param_groups())
        group.options().set_lr(group.options().get_lr() * (step % 2 == 0 ? 0.5 : 1.5));
      run.train(step);
    }
  });
}

TEST_P(Programs, OptimizerWithAClosure) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.note(run.optimizer().step([&] {
        torch::AutoGradMode with_grad(true);
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        loss.backward();
        return loss;
      }));
    }
  });
}

TEST_P(Programs, InferenceModeInTheMiddle) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      c10::InferenceMode inference;
      const at::Tensor y = run(run.x(9));
      run.note((y - run.y(9)).square().mean());
    }
  });
}

// Input gradients in an evaluation: saliency maps, adversarial examples.
TEST_P(Programs, GradientsOfInputsOnly) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      const at::Tensor x = run.x(9).requires_grad_();
      const at::Tensor slope = torch::autograd::grad({run.model->forward(x).square().sum()}, {x})[0];
      run.note(slope.square().mean());
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Programs, StepEveryOtherBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      run.loss(step).backward();
      if (step % 2 == 0) continue;
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Programs, TheWrapperIsMadeAgain) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    auto again = run.another(run.model);
    again->train(1);
    run.note_state(*again);
  });
}

// ---- losses summed over unequal parts

// The first rank has most of the rows, the others two each.
at::Tensor part(const Trainer& run, const at::Tensor& all) {
  const int64_t first = kRows - 2 * (run.world - 1);
  if (run.rank == 0) return all.slice(0, 0, first);
  return all.slice(0, first + 2 * (run.rank - 1), first + 2 * run.rank);
}

TEST_P(Programs, GradientsDividedByTheNumberOfTokens) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    run.set_gradient_divide_factor(kRows);
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run(part(run, run.x(step))) - part(run, run.y(step))).square().sum().backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Programs, AGradientDivisorOfNothingIsRefused) {
  play(GetParam(), {.optimizers = {Optim::kSgd}}, [](Trainer& run) {
    if (run.world == 1) return;
    for (double factor : {0.0, -1.0})
      EXPECT_NE(error_of<std::invalid_argument>([&] { run.set_gradient_divide_factor(factor); }), "") << factor;
  });
}

}  // namespace
}  // namespace tessera::loops
