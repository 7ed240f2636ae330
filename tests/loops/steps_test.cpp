// Steps at any time, and closures.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::steps_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Steps, all_setups);

TEST_P(Steps, StepBeforeAnyBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    run.optimizer().step();
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Steps, TwoStepsOfOneBackward) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.optimizer().step();
    }
  });
}

TEST_P(Steps, AClosureThatIsCalledSeveralTimes) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      auto closure = [&] {
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        loss.backward();
        return loss;
      };
      closure();
      run.note(closure());
      run.note(run.optimizer().step(closure));
    }
  });
}

TEST_P(Steps, AStepIsLeftOutByAll) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 5; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      if (step % 2 == 0) run.optimizer().step();
    }
  });
}

TEST_P(Steps, LossesThatAreNoNumbersAreLeftOut) {
  const bool checks = GetParam().name == "fsdp_ahead";  // check_finite
  play(GetParam(),
       {.expect = checks ? Expect::kRefused : Expect::kEqual, .says = {"reduced gradients are infinite or NaN"}},
       [](Trainer& run) {
         for (int step = 0; step < 4; ++step) {
           run.optimizer().zero_grad();
           const at::Tensor loss = run.loss(step) * (step == 1 ? std::nan("") : 1);
           loss.backward();
           if (!std::isnan(loss.item<double>())) run.optimizer().step();
         }
       });
}

TEST_P(Steps, OptimizerWithAClosure) {
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

TEST_P(Steps, StepEveryOtherBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      run.loss(step).backward();
      if (step % 2 == 0) continue;
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// Returns the loss of a forward that precedes a step.
at::Tensor outdated_loss(Trainer& run) {
  run.train(0);
  run.optimizer().zero_grad();
  run.loss(1).backward();
  at::Tensor loss = run.loss(2);
  run.optimizer().step();
  return loss;
}

TEST_P(Steps, StepBetweenForwardAndBackwardWithAdam) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}},
       [](Trainer& run) { outdated_loss(run).backward(); });
}

TEST_P(Steps, StepBetweenTheBackwardsOfTwoForwardsWithAdam) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    at::Tensor first = run.loss(1), second = run.loss(2);
    second.backward();
    run.optimizer().step();
    first.backward();
  });
}

TEST_P(Steps, StepBetweenTwoForwardsBeforeTheFirstOnesBackward) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    at::Tensor first = outdated_loss(run);
    at::Tensor second = run.loss(3);
    (first + second).backward();
  });
}

TEST_P(Steps, StepAndALookAtFullParametersBeforeBackward) {
  play(GetParam(), {.expect = Expect::kThrows, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    at::Tensor loss = outdated_loss(run);
    if (run.fsdp() != nullptr) run.fsdp()->summon_full_params().leave();
    loss.backward();
  });
}

// torch's SGD bypasses version counters, so backward uses the new values in one process.
TEST_P(Steps, StepBetweenForwardAndBackwardWithSgd) {
  play(GetParam(), {.expect = Expect::kEither, .optimizers = {Optim::kSgd}}, [](Trainer& run) {
    at::Tensor loss = outdated_loss(run);
    run.optimizer().zero_grad();
    loss.backward();
    run.optimizer().step();
  });
}

}  // namespace
}  // namespace tessera::loops::steps_test
