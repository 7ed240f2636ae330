// Forwards, backwards and steps that throw and are caught.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::failures_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Failures, all_setups);
TESSERA_LOOPS(FailuresReplicated, replicated_setups);

TEST_P(Failures, ASecondBackwardIsRefusedAndCaught) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = run.loss(step);
      loss.backward();
      if (step == 1) {
        bool thrown = false;
        try {
          loss.backward();
        } catch (const std::exception&) {
          thrown = true;
        }
        if (!thrown) throw std::runtime_error("the graph is there a second time");
        run.optimizer().zero_grad();
        run.loss(step).backward();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Failures, AHookOnAWeightThrowsAndIsTakenAway) {
  play(GetParam(), {}, [](Trainer& run) {
    const at::Tensor weight = mlp_of(*run.model).fc2->weight;
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) {
        run.optimizer().zero_grad();
        const unsigned position =
            weight.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the user's hook"); });
        expect_users_error([&] { run.loss(step + 7).backward(); });
        weight.remove_hook(position);
        run.optimizer().zero_grad();
      }
      run.train(step);
    }
  });
}

TEST_P(Failures, AClosureThatThrowsAtItsFirstCall) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    for (int step = 1; step < 4; ++step) {
      int calls = 0;
      auto closure = [&] {
        run.optimizer().zero_grad();
        const at::Tensor loss = run.loss(step);
        if (step == 2 && calls++ == 0) throw std::runtime_error("the user's hook");
        loss.backward();
        return loss;
      };
      if (step == 2) expect_users_error([&] { run.optimizer().step(closure); });
      run.note(run.optimizer().step(closure));
    }
  });
}

bool on_any_rank(Trainer& run, bool flag) {
  if (run.shards() == nullptr) return flag;
  at::Tensor any = torch::full({1}, flag ? 1. : 0.).to(run.device);
  run.shards()->comm()->all_reduce(any, ReduceOp::kMax, "a flag").wait();
  return run.shards()->comm()->to_host(any, "a flag").item<double>() > 0;
}

// One rank's data is invalid. The ranks exchange a flag, and all skip the step.
TEST_P(FailuresReplicated, AForwardThatFailsOnOneRankIsGivenUpByAll) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 5; ++step) {
      run.optimizer().zero_grad();
      bool failed = false;
      at::Tensor loss;
      if (step == 2 && run.rank == run.world - 1) net.in_forward = [] { throw std::runtime_error("no data"); };
      try {
        loss = run.loss(step);
      } catch (const std::runtime_error&) {
        failed = true;
      }
      net.in_forward = nullptr;
      if (on_any_rank(run, failed)) continue;
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

// The rank whose forward fails calls it again. The others do not know.
TEST_P(FailuresReplicated, AForwardThatFailsOnOneRankIsCalledAgainThere) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      if (step == 2 && run.rank == run.world - 1) {
        net.in_forward = [] { throw std::runtime_error("the user's hook"); };
        expect_users_error([&] { run.loss(step); });
        net.in_forward = nullptr;
      }
      run.train(step);
    }
  });
}

// The optimizer's step throws, is caught, and training continues.
TEST_P(Failures, AStepThatThrowsIsCaught) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    try {
      run.optimizer().step([]() -> at::Tensor { throw std::runtime_error("the user's closure"); });
    } catch (const std::runtime_error&) {
    }
    run.train(1);
    run.train(2);
  });
}

// DistributedDataParallel names an unused layer in the next forward. The other wrappers and the one process go on.
TEST_P(Failures, AnUnusedLayerIsNamedAndThenFrozen) {
  play(GetParam(), {}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    net.skip_fc2 = true;
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss;
      try {
        loss = run.loss(step);
      } catch (const std::runtime_error&) {
        set_frozen(*net.fc2, true);
        loss = run.loss(step);
      }
      loss.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Failures, FailedThenZeroGradAndOn) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(3 * step);
      run.optimizer().zero_grad();
      expect_users_error([&] { failing_loss(run, 3 * step + 1).backward(); });
      run.train(3 * step + 2);
    }
  });
}

TEST_P(Failures, FailedInTheFirstStep) {
  play(GetParam(), {}, [](Trainer& run) {
    expect_users_error([&] { failing_loss(run, 0).backward(); });
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(Failures, FailedThenModuleZeroGradAndOn) {
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

TEST_P(Failures, FailedThenStep) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    expect_users_error([&] { failing_loss(run, 1).backward(); });
    run.optimizer().step();
    run.train(2);
  });
}

TEST_P(Failures, FailedAfterGoodOnesUnderNoSync) {
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

TEST_P(Failures, FailedAfterNoSync) {
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

TEST_P(Failures, ForwardThatThrowsInTheMiddle) {
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

}  // namespace
}  // namespace tessera::loops::failures_test
