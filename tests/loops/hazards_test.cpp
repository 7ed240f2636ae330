// Loops that have crashed or hung: a program of their own, so that the others run.
#include "tests/loops/failing_backward.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Hazards, all_setups);
TESSERA_LOOPS(Visitor, fsdp_setups);

// One process adds the second pass to what the first left.
TEST_P(Hazards, FailedThenTheSameAgain) {
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

TEST_P(Hazards, FailedThenTheSameAgainAfterZeroGrad) {
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

TEST_P(Visitor, AsksForMemory) {
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

TEST_P(Visitor, UsesParametersOfTheModule) {
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
}  // namespace tessera::loops
