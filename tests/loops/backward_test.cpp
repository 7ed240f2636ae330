// Backward passes that fail, come twice, come for several forwards, or for something besides the loss.
#include <stdexcept>

#include "tests/loops/failing_backward.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Backward, all_setups);

// ---- failed ones

TEST_P(Backward, FailedThenZeroGradAndOn) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(3 * step);
      run.optimizer().zero_grad();
      expect_users_error([&] { failing_loss(run, 3 * step + 1).backward(); });
      run.train(3 * step + 2);
    }
  });
}

TEST_P(Backward, FailedInTheFirstStep) {
  play(GetParam(), {}, [](Trainer& run) {
    expect_users_error([&] { failing_loss(run, 0).backward(); });
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(Backward, FailedThenModuleZeroGradAndOn) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.model->zero_grad();
    expect_users_error([&] { failing_loss(run, 1).backward(); });
    run.model->zero_grad();
    run.loss(2).backward();
    run.optimizer().step();
    run.train(3);
  });
}

TEST_P(Backward, FailedThenStep) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    expect_users_error([&] { failing_loss(run, 1).backward(); });
    run.optimizer().step();
    run.train(2);
  });
}

TEST_P(Backward, FailedAfterGoodOnesUnderNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    {
      auto scope = run.no_sync();
      run.loss(1).backward();
      run.loss(2).backward();
      expect_users_error([&] { failing_loss(run, 3).backward(); });
    }
    for (int step = 4; step < 6; ++step) run.train(step);
  });
}

TEST_P(Backward, FailedAfterNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    {
      auto scope = run.no_sync();
      run.loss(1).backward();
    }
    expect_users_error([&] { failing_loss(run, 2).backward(); });
    for (int step = 3; step < 5; ++step) run.train(step);
  });
}

TEST_P(Backward, ForwardThatThrowsInTheMiddle) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 0) {
        net.in_forward = [] { throw std::runtime_error("the user's hook"); };
        expect_users_error([&] { run.loss(9); });
        net.in_forward = nullptr;
      }
      run.train(step);
    }
  });
}

// ---- a step at the wrong time

TEST_P(Backward, StepAfterNoSyncAlone) {
  // A torch::optim optimizer under DDP knows of no ranks: its step is noticed by the next forward.
  play(GetParam(),
       {.expect = Expect::kRefused,
        .says = {"was made under no_sync() and has not been reduced", "is this rank's own sum",
                 "it was changed after a backward under no_sync()"},
        .equal_alone = true},
       [](Trainer& run) {
         run.train(0);
         run.optimizer().zero_grad();
         {
           auto scope = run.no_sync();
           run.loss(1).backward();
         }
         run.optimizer().step();
         run.train(2);
       });
}

// The loss of a forward before a step.
at::Tensor outdated_loss(Trainer& run) {
  run.train(0);
  run.optimizer().zero_grad();
  run.loss(1).backward();
  at::Tensor loss = run.loss(2);
  run.optimizer().step();
  return loss;
}

TEST_P(Backward, StepBetweenForwardAndBackwardWithAdam) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}},
       [](Trainer& run) { outdated_loss(run).backward(); });
}

TEST_P(Backward, StepBetweenTheBackwardsOfTwoForwardsWithAdam) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    at::Tensor first = run.loss(1), second = run.loss(2);
    second.backward();
    run.optimizer().step();
    first.backward();
  });
}

TEST_P(Backward, StepBetweenTwoForwardsBeforeTheFirstOnesBackward) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    at::Tensor first = outdated_loss(run);
    at::Tensor second = run.loss(3);
    (first + second).backward();
  });
}

TEST_P(Backward, StepAndALookAtFullParametersBeforeBackward) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    at::Tensor loss = outdated_loss(run);
    if (run.fsdp() != nullptr) run.fsdp()->summon_full_params().leave();
    loss.backward();
  });
}

// SGD's loop writes behind autograd's back: the backward of one process uses the new values.
TEST_P(Backward, StepBetweenForwardAndBackwardWithSgd) {
  play(GetParam(), {.expect = Expect::kEither, .optimizers = {Optim::kSgd}}, [](Trainer& run) {
    at::Tensor loss = outdated_loss(run);
    run.optimizer().zero_grad();
    loss.backward();
    run.optimizer().step();
  });
}

// ---- several forwards and backwards

TEST_P(Backward, TwoOfOneGraph) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, TwoForwardsThenOneOfTheSum) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run.loss(2 * step) + run.loss(2 * step + 1)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, TwoForwardsThenTwo) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor first = run.loss(2 * step), second = run.loss(2 * step + 1);
      first.backward();
      second.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, TwoHeadsOfOneForward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor y = run(run.x(step));
      y.slice(1, 0, 4).square().mean().backward({}, /*retain_graph=*/true);
      torch::mse_loss(y.slice(1, 4), run.y(step).slice(1, 4)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, UnderNoGradMode) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      torch::NoGradGuard no_grad;
      loss.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, OfAPartOfTheModelOnly) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      net.skip_fc2 = step % 2 == 0;
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

// Weights are used once more, outside of forward: autograd adds up both.
TEST_P(Backward, RegularisedByTheModulesOwnParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      for (const auto& parameter : run.model->parameters()) loss = loss + 0.1 * parameter.square().sum();
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

// Under FSDP the sum is over this rank's part: its gradient is right where it is, and is no mean over ranks.
TEST_P(Backward, RegularisedByTheWrappersParameters) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor penalty = torch::zeros({}, at::kDouble);
      for (const auto& parameter : run.parameters()) penalty = penalty + parameter.square().sum();
      (run.loss(step) + 0.1 * penalty).backward();
      run.optimizer().step();
    }
  });
}

// WGAN-GP: the gradient's own gradient.
TEST_P(Backward, GradientPenalty) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      at::Tensor x = run.x(step).requires_grad_();
      at::Tensor y = run(x);
      const at::Tensor slope = torch::autograd::grad({y.square().sum()}, {x}, {}, true, true)[0];
      (torch::mse_loss(y, run.y(step)) + 0.1 * slope.square().sum(1).mean()).backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops
