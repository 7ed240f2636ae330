// Mistakes of one rank alone. All ranks must refuse them by name, before any rank waits without end. One process has no
// counterpart, so results that equal its own are wrong, too.
#include "tests/loops/loops.h"

namespace tessera::loops::one_rank_test {
namespace {

TESSERA_LOOPS(OneRank, all_setups);

bool is_last(const Trainer& run) { return run.world > 1 && run.rank == run.world - 1; }

bool has_owners() {
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  return name.find("oss") != std::string::npos || name.find("/zero1") != std::string::npos ||
         name.find("/zero2") != std::string::npos;
}

// Does not note the loss, which already differs when the ranks detect the mistake.
void train_unseen(Trainer& run, int step) {
  run.optimizer().zero_grad();
  run.loss(step).backward();
  run.optimizer().step();
}

// Equal in a world of one, where no rank differs.
Play refused(std::vector<std::string> says) {
  return {.expect = Expect::kRefused, .says = std::move(says), .equal_alone = true};
}
const std::vector<std::string> kOther{"'freezing of fc2.weight'", "the ranks have diverged"};
const std::vector<std::string> kNoStep{"'a step of the model'", "the ranks have diverged"};

TEST_P(OneRank, FreezesAWeight) {
  Play play_it = refused(kOther);
  play_it.unused = true;
  play(GetParam(), play_it, [](Trainer& run) {
    train_unseen(run, 0);
    if (is_last(run)) mlp_of(*run.model).fc2->weight.requires_grad_(false);
    for (int step = 1; step < 3; ++step) train_unseen(run, step);
  });
}

TEST_P(OneRank, DividesGradientsByAnotherFactor) {
  if (GetParam().name == "oss_alone") return;  // which has no wrapper that divides
  play(GetParam(), refused({"divided by", "the ranks have diverged"}), [](Trainer& run) {
    train_unseen(run, 0);
    run.set_gradient_divide_factor(is_last(run) ? 3 : 2);
    for (int step = 1; step < 3; ++step) train_unseen(run, step);
  });
}

// Under DDP and stage 1 each rank clips by its own choice: not supported (docs/loops.md).
TEST_P(OneRank, ClipsToAnotherNorm) {
  if (GetParam().stage < 2) return;
  play(GetParam(), refused({"clipped to", "the ranks have diverged"}), [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      run.clip_grad_norm_(is_last(run) && step == 1 ? 0.2 : 0.1);
      run.optimizer().step();
    }
  });
}

TEST_P(OneRank, FreezesAWeightBetweenForwardAndBackward) {
  Play play_it = refused(kOther);
  play_it.unused = true;
  play(GetParam(), play_it, [](Trainer& run) {
    train_unseen(run, 0);
    run.optimizer().zero_grad();
    const at::Tensor loss = run.loss(1);
    if (is_last(run)) mlp_of(*run.model).fc2->weight.requires_grad_(false);
    loss.backward();
    run.optimizer().step();
    train_unseen(run, 2);
  });
}

TEST_P(OneRank, FreezesAWeightFromTheBeginning) {
  Play play_it = refused(kOther);
  play_it.unused = true;
  play(GetParam(), play_it, [](Trainer& run) {
    if (is_last(run)) run.parameters()[2].requires_grad_(false);
    for (int step = 0; step < 3; ++step) train_unseen(run, step);
  });
}

void clear_before_a_step(Trainer& run, const std::function<void()>& clear) {
  train_unseen(run, 0);
  run.optimizer().zero_grad();
  run.loss(1).backward();
  if (is_last(run)) clear();
  run.optimizer().step();
  train_unseen(run, 2);
}

TEST_P(OneRank, ClearsGradientsBeforeAStep) {
  if (GetParam().stage == 0) GTEST_SKIP() << "DDP does not see the steps of torch's optimizers";
  if (has_owners()) return;  // owners step, and publish to all ranks
  play(GetParam(), refused(kNoStep), [](Trainer& run) { clear_before_a_step(run, [&] { run.zero_grad(); }); });
}

TEST_P(OneRank, ClearsGradientsOfTheModuleBeforeAStep) {
  if (GetParam().stage == 0) GTEST_SKIP() << "DDP does not see the steps of torch's optimizers";
  if (has_owners()) return;  // likewise
  play(GetParam(), refused(kNoStep), [](Trainer& run) { clear_before_a_step(run, [&] { run.model->zero_grad(); }); });
}

TEST_P(OneRank, ClearsGradientsBetweenTwoBackwards) {
  if (GetParam().stage == 2) return;  // a gradient is at its owner alone
  play(GetParam(), refused({" has a gradient to add to on rank "}), [](Trainer& run) {
    train_unseen(run, 0);
    run.optimizer().zero_grad();
    run.loss(1).backward();
    if (is_last(run)) run.optimizer().zero_grad();
    run.loss(2).backward();
    run.optimizer().step();
    train_unseen(run, 3);
  });
}

TEST_P(OneRank, LeavesOutAStep) {
  if (GetParam().stage == 0) GTEST_SKIP() << "DDP does not see the steps of torch's optimizers";
  play(GetParam(), refused(kNoStep), [](Trainer& run) {
    train_unseen(run, 0);
    run.optimizer().zero_grad();
    run.loss(1).backward();
    if (!is_last(run)) run.optimizer().step();
    for (int step = 2; step < 4; ++step) train_unseen(run, step);
  });
}

// For example, because the loss of that rank was not finite.
TEST_P(OneRank, TheLastRankLeavesOutABackward) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      if (step == 2 && run.world > 1 && run.rank == run.world - 1) continue;
      loss.backward();
      run.optimizer().step();
    }
  });
}

TESSERA_LOOPS(OneRankOfCopies, replicated_setups);

// Catches the error, and continues with the next step.
TEST_P(OneRankOfCopies, HasABackwardThatFails) {
  if (GetParam().name == "oss_alone") return;  // no wrapper sees backwards
  play(GetParam(), refused({"'a failed backward of the model'", "the ranks have diverged"}), [](Trainer& run) {
    train_unseen(run, 0);
    if (is_last(run))
      mlp_of(*run.model).hook = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the user's own"); };
    try {
      train_unseen(run, 1);
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()).find("the user's own") == std::string::npos) throw;
    }
    mlp_of(*run.model).hook = nullptr;
    for (int step = 2; step < 5; ++step) train_unseen(run, step);
  });
}

// Refused, unlike a failed forward that the rank repeats, or after which all ranks skip backward.
TEST_P(OneRankOfCopies, LeavesOutABackwardAfterAForwardThatFailed) {
  if (GetParam().name == "oss_alone") return;  // no wrapper sees backwards
  play(GetParam(), refused({"'forward of the model'"}), [](Trainer& run) {
    train_unseen(run, 0);
    for (int step = 1; step < 4; ++step) {
      Mlp& net = mlp_of(*run.model);
      if (step == 1 && is_last(run)) {
        net.in_forward = [] { throw std::runtime_error("no data"); };
        EXPECT_THROW(run.loss(step), std::runtime_error);
        net.in_forward = nullptr;
        run.loss(step);
        continue;
      }
      train_unseen(run, step);
    }
  });
}

// Only Tessera's optimizers are compared.
TEST_P(OneRank, HasAnotherLearningRate) {
  if (!has_owners()) return;
  play(GetParam(), refused({"what was published in a step: rank 0 has 'options of group 0"}), [](Trainer& run) {
    train_unseen(run, 0);
    if (is_last(run)) run.optimizer().param_groups()[0].options().set_lr(0.3);
    for (int step = 1; step < 3; ++step) train_unseen(run, step);
  });
}

TEST_P(OneRank, RemovesAParameterOfItsGroup) {
  if (!has_owners()) return;
  play(GetParam(),
       refused({"from parameter number 5 on", "parameter 'fc3.bias' has a gradient to add to on rank ",
                "the gradient of parameter number 5, which is in no group now"}),
       [](Trainer& run) {
         train_unseen(run, 0);
         if (is_last(run)) run.optimizer().param_groups()[0].params().pop_back();
         for (int step = 1; step < 3; ++step) train_unseen(run, step);
       });
}

TEST_P(OneRank, AddsAGroup) {
  if (!has_owners()) return;
  play(GetParam(), refused({"the ranks have diverged"}), [](Trainer& run) {
    train_unseen(run, 0);
    const at::Tensor more = torch::ones({2}, at::kDouble).requires_grad_();
    if (is_last(run)) run.optimizer().add_param_group(torch::optim::OptimizerParamGroup({more}));
    for (int step = 1; step < 3; ++step) train_unseen(run, step);
  });
}

// All do it: OSS knows parameters by their places.
TEST_P(OneRank, AllRemoveAParameterOfTheGroup) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    train_unseen(run, 0);
    run.optimizer().param_groups()[0].params().pop_back();
    for (int step = 1; step < 3; ++step) train_unseen(run, step);
  });
}

}  // namespace
}  // namespace tessera::loops::one_rank_test
