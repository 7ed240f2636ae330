// zero_grad() of every form.
#include "tests/loops/loops.h"

#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace tessera::loops::zero_grad_test {
using namespace internal;
namespace {

TESSERA_LOOPS(ZeroGrad, all_setups);

TEST_P(ZeroGrad, GradientsClearedOneByOne) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      for (auto& parameter : run.parameters()) {
        if (!parameter.grad().defined()) continue;
        switch (step % 3) {
          case 0:
            parameter.mutable_grad().reset();
            break;
          case 1:
            parameter.mutable_grad().detach_().zero_();
            break;
          default:
            parameter.mutable_grad() = at::zeros_like(parameter);
        }
      }
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, GradientsDefinedAsZerosByHandOnTheWrappersParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : run.parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, ByTheOptimizerToNone) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) run.train(step);
  });
}

TEST_P(ZeroGrad, ByTheOptimizerToZero) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad(false);
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, OnceByEachInTurn) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      if (step % 3 == 0) run.optimizer().zero_grad(step == 0);
      if (step % 3 == 1) run.model->zero_grad(step == 1);
      if (step % 3 == 2) run.zero_grad(step == 2);
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, OfNothingBeforeTheFirstForward) {
  play(GetParam(), {}, [](Trainer& run) {
    run.optimizer().zero_grad(false);
    run.model->zero_grad(false);
    run.optimizer().step();
    for (int step = 0; step < 2; ++step) run.train(step);
  });
}

TEST_P(ZeroGrad, BetweenForwardAndBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss = run.loss(step);
      run.optimizer().zero_grad();
      loss.backward();
      run.optimizer().step();
    }
  });
}

// A step without gradients changes nothing: the next one starts from equal values.
TEST_P(ZeroGrad, ByTheOptimizerAfterBackwardLeavesNothingToStep) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    run.train(0);
    run.loss(1).backward();
    run.optimizer().zero_grad();
    run.optimizer().step();
    run.note(run.loss(1).detach());
    run.train(2);
  });
}

TEST_P(ZeroGrad, ByTheModuleAfterBackwardLeavesNothingToStep) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    run.train(0);
    run.loss(1).backward();
    run.model->zero_grad();
    run.optimizer().step();
    run.note(run.loss(1).detach());
    run.train(2);
  });
}

TEST_P(ZeroGrad, ByTheModuleToZeroAfterBackward) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    run.train(0);
    run.loss(1).backward();
    run.model->zero_grad(false);
    run.optimizer().step();
    run.train(2);
  });
}

// The module sets gradients to zeros, and after another backward to none.
TEST_P(ZeroGrad, ByTheModuleInBothWays) {
  const Expect may_refuse = where_gradients_stay(GetParam()) == Expect::kRefused ? Expect::kEither : Expect::kEqual;
  play(GetParam(), {.expect = may_refuse, .says = kDropped}, [](Trainer& run) {
    run.train(0);
    run.model->zero_grad(false);
    run.loss(1).backward();
    run.model->zero_grad();
    run.optimizer().step();
    run.note(run.loss(1).detach());
    run.train(2);
  });
}

// Infinite and NaN gradients become zeros too, so they do not affect the next clipping.
TEST_P(ZeroGrad, ToZerosAfterANormThatIsNoNumber) {
  const bool checks = GetParam().name == "fsdp_ahead";  // check_finite
  const Play play_it{.expect = checks ? Expect::kRefused : Expect::kEqual,
                     .says = {"reduced gradients are infinite or NaN"}};
  for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    play(GetParam(), play_it, [bad](Trainer& run) {
      for (int step = 0; step < 4; ++step) {
        run.optimizer().zero_grad(false);
        (run.loss(step) * (step == 1 ? bad : 1.0)).backward();
        const double norm = run.clip_grad_norm_(0.1);
        run.notes.push_back(std::isfinite(norm) ? 1 : 0);
        if (std::isfinite(norm)) run.optimizer().step();
      }
    });
}

TEST_P(ZeroGrad, ByTheModuleRightBeforeBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss = run.loss(step);
      run.model->zero_grad();
      loss.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, ByTheModuleAfterStep) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.loss(step).backward();
      run.optimizer().step();
      run.model->zero_grad();
    }
  });
}

// A parameter that the next backward does not reach has no gradient then, and stays unchanged.
TEST_P(ZeroGrad, ByTheModuleWhenOnlyABranchIsUsedNext) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.model->zero_grad();
      mlp_of(*run.model).skip_fc2 = step % 2 == 1;
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, OfOneLayerOnly) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    run.loss(1).backward();
    mlp_of(*run.model).fc2->zero_grad();
    run.loss(2).backward();  // adds to the gradients of the other layers
    run.optimizer().step();
  });
}

TEST_P(ZeroGrad, DropsWhatNoSyncGathered) {
  for (int by : {0, 1, 2}) {
    play(GetParam(), {}, [by](Trainer& run) {
      run.train(0);
      run.optimizer().zero_grad();
      {
        auto scope = run.no_sync();
        run.loss(1).backward();
        run.loss(2).backward();
      }
      if (by == 0) run.optimizer().zero_grad();
      if (by == 1) run.model->zero_grad();
      if (by == 2) run.zero_grad();
      for (int step = 3; step < 5; ++step) {
        run.loss(step).backward();
        run.optimizer().step();
        run.optimizer().zero_grad();
      }
    });
  }
}

TEST_P(ZeroGrad, InTheMiddleOfNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    {
      auto scope = run.no_sync();
      run.loss(1).backward();
      run.optimizer().zero_grad();
      run.loss(2).backward();
    }
    run.loss(3).backward();
    run.optimizer().step();
  });
}

}  // namespace
}  // namespace tessera::loops::zero_grad_test
