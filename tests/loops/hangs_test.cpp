// Loops that have crashed or hung.
#include "tests/loops/loops.h"

#include "tests/loops/failing_backward.h"

namespace tessera::loops::hangs_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Hangs, all_setups);
TESSERA_LOOPS(HangsSharded, fsdp_setups);

// One process adds the second pass to the gradients of the first.
TEST_P(Hangs, FailedThenTheSameAgain) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    at::Tensor loss = failing_loss(run, 1);
    expect_users_error([&] { loss.backward({}, /*retain_graph=*/true); });
    loss.backward();
    run.optimizer().step();
    run.train(2);
  });
}

TEST_P(Hangs, FailedThenTheSameAgainAfterZeroGrad) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    at::Tensor loss = failing_loss(run, 1);
    expect_users_error([&] { loss.backward({}, /*retain_graph=*/true); });
    run.optimizer().zero_grad();
    loss.backward();
    run.optimizer().step();
    run.train(2);
  });
}

TEST_P(HangsSharded, AsksForMemory) {
  play(GetParam(), {.optimizers = {Optim::kAdam}}, [](Trainer& run) {
    run.train(0);
    if (run.fsdp() != nullptr) {
      run.fsdp()->visit_full_state([&](const std::string& name, const at::Tensor&) {
        EXPECT_GE(run.fsdp()->memory().gathered_bytes, 0) << name;
      });
    }
    for (int step = 1; step < 3; ++step) run.train(step);
  });
}

TEST_P(HangsSharded, UsesParametersOfTheModule) {
  play(GetParam(), {.optimizers = {Optim::kAdam}}, [](Trainer& run) {
    run.train(0);
    if (run.fsdp() != nullptr) {
      run.fsdp()->visit_full_state([&](const std::string& name, const at::Tensor& tensor) {
        torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(run.model->named_parameters()[name] * 1, tensor)) << name;
        mlp_of(*run.model).fc1->weight.square().sum();
      });
    }
    for (int step = 1; step < 3; ++step) run.train(step);
  });
}

}  // namespace
}  // namespace tessera::loops::hangs_test
