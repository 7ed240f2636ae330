// Gradients that accumulate over several backwards, under no_sync() or not.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::accumulation_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Accumulation, all_setups);

TEST_P(Accumulation, OtherNumbersOfMicroBatches) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      const int parts = 1 + step % 3;
      for (int part = 0; part < parts; ++part) {
        std::unique_ptr<ScopeExit> outer, inner;
        if (part + 1 < parts) outer = std::make_unique<ScopeExit>(run.no_sync());
        if (part == 0 && outer) inner = std::make_unique<ScopeExit>(run.no_sync());
        (run.loss(step + part) / parts).backward();
        inner.reset();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// emplace() and assignments open the next scope before they close the last one.
TEST_P(Accumulation, ScopesThatCloseInTheOrderOfOpening) {
  play(GetParam(), {}, [](Trainer& run) {
    std::optional<ScopeExit> scope;
    for (int step = 0; step < 3; ++step) {
      for (int part = 0; part < 3; ++part) {
        if (part == 2) {
          scope.reset();
        } else if (step == 1) {
          scope = run.no_sync();
        } else {
          scope.emplace(run.no_sync());
        }
        (run.loss(step + part) / 3).backward();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Accumulation, AFullStateBetweenMicroBatches) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      {
        const ScopeExit scope = run.no_sync();
        run.loss(step).backward();
      }
      run.note_state(run);
      run.loss(step + 1).backward();
      run.note_state(run);
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// Returns this rank's part of the first `rows` rows.
at::Tensor own_rows(const Trainer& run, const at::Tensor& all, int64_t rows) {
  return all.slice(0, rows * run.rank / run.world, rows * (run.rank + 1) / run.world);
}

// Steps have one to three parts, and the last step fewer rows. Sums of losses are divided by the rows of all ranks.
TEST_P(Accumulation, PartsOfOtherNumbersAndAShortLastBatch) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      const int parts = 1 + (step + 1) % 3;
      const int64_t rows = step == 3 ? 5 : kRows;
      run.divide_gradients_by_sum(parts * own_rows(run, run.x(0), rows).size(0));
      for (int part = 0; part < parts; ++part) {
        std::unique_ptr<ScopeExit> alone;
        if (part + 1 < parts) alone = std::make_unique<ScopeExit>(run.no_sync());
        const at::Tensor x = own_rows(run, run.x(3 * step + part), rows);
        (run(x) - own_rows(run, run.y(3 * step + part), rows)).square().sum().backward();
      }
      run.notes.push_back(run.clip_grad_norm_(5));
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// The gradients of a first backward are cleared; a second backward through the same graph gives those of the step.
TEST_P(Accumulation, GradientsOfTwoGraphsOfWhichOneIsDropped) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = run.loss(step);
      loss.backward({}, /*retain_graph=*/true);
      run.optimizer().zero_grad();
      (2 * loss).backward();
      run.note(loss.detach());
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Accumulation, AnExceptionLeavesNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    expect_users_error([&] {
      const ScopeExit alone = run.no_sync();
      run.loss(1).backward();
      const at::Tensor loss = run.loss(2);
      throw std::runtime_error("the user's hook");
    });
    run.loss(3).backward();  // adds to the first backward's gradients
    run.optimizer().step();
    run.train(4);
  });
}

// Throws, as in one process: the graph of the previous step has been freed.
TEST_P(Accumulation, TheLastStepsOutputIsNotDetached) {
  play(GetParam(), {.expect = Expect::kThrows}, [](Trainer& run) {
    at::Tensor last = torch::zeros({}, at::kDouble);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = run(run.x(step) + last);
      step_with(run, torch::mse_loss(out, run.y(step)));
      last = out;
    }
  });
}

// The sum of losses of several forwards, one backward.
TEST_P(Accumulation, LossesAddedUpOverMicroBatches) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      at::Tensor sum = torch::zeros({}, at::kDouble);
      for (int micro = 0; micro < 3; ++micro) sum = sum + run.loss(3 * step + micro) / 3;
      run.note(sum);
      sum.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Accumulation, GivenUpUnderNoSyncThenOtherValues) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    run.train(0);
    {
      auto scope = run.no_sync();
      run.loss(1).backward();
    }
    run.optimizer().zero_grad();
    for (auto& parameter : run.parameters()) parameter.data().mul_(0.9);
    run.train(2);
    {
      auto scope = run.no_sync();
      run.loss(3).backward();
    }
    const torch::NoGradGuard no_grad;
    for (auto& parameter : run.parameters()) parameter.mul_(0.9);
    const torch::AutoGradMode mode(true);
    const at::Tensor loss = run.loss(4);
    run.note(loss);
    loss.backward();
    run.optimizer().step();
  });
}

TEST_P(Accumulation, StepAfterNoSyncAlone) {
  if (GetParam().stage == 0) GTEST_SKIP() << "a torch::optim optimizer under DDP knows no ranks";
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
         run.optimizer().step();
         run.train(2);
       });
}

TEST_P(Accumulation, Accumulation) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      for (int part = 0; part < 3; ++part) (run.loss(3 * step + part) / 3).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Accumulation, AccumulationUnderNoSyncWithAValidationInTheMiddle) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      {
        auto scope = run.no_sync();
        run.loss(3 * step).backward();
        {
          torch::NoGradGuard no_grad;
          run.note(run.loss(9));
        }
        run.loss(3 * step + 1).backward();
      }
      run.loss(3 * step + 2).backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::accumulation_test
