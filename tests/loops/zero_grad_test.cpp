// Clearing gradients, by whoever clears them and whenever.
#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(ZeroGrad, all_setups);

// ---- the optimizer's

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

// A step without gradients does nothing, so the one after it starts from the same values.
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

// ---- the module's

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

// What the next backward does not touch has no gradient then, and stays as it is.
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
    run.loss(2).backward();  // adds to what the others have
    run.optimizer().step();
  });
}

// ---- while gradients are accumulated

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

TEST_P(ZeroGrad, Accumulation) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      for (int part = 0; part < 3; ++part) (run.loss(3 * step + part) / 3).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(ZeroGrad, AccumulationUnderNoSyncWithAValidationInTheMiddle) {
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

// ---- gradients are tensors, and users write them

TEST_P(ZeroGrad, GradientsScaledInPlaceAndReplaced) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (auto& parameter : run.parameters()) {
        if (!parameter.grad().defined()) continue;  // another rank owns it
        parameter.mutable_grad().mul_(0.5);
        if (step == 1) parameter.mutable_grad() = parameter.grad() * 0.5;
      }
      run.optimizer().step();
    }
  });
}

// Momentum of the user's own: handles of the last gradients, kept over zero_grad and the next backward.
TEST_P(ZeroGrad, HandlesOfLastGradientsKeepTheirValues) {
  play(GetParam(), {}, [](Trainer& run) {
    std::vector<at::Tensor> last;
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      std::vector<at::Tensor> current;
      auto parameters = run.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        current.push_back(parameters[i].grad());
        if (!last.empty() && current[i].defined()) parameters[i].mutable_grad() = current[i] + 0.5 * last[i];
      }
      run.optimizer().step();
      last = current;
    }
  });
}

}  // namespace
}  // namespace tessera::loops
