// Options and states of optimizers.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <limits>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::loops::optimizers_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Optimizers, all_setups);

// Each rank saves its own optimizer to memory, as a program of one process does.
TEST_P(Optimizers, OptimizerSavedAndLoadedByTorch) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) run.train(step);
    std::stringstream file;
    torch::save(run.optimizer(), file);
    run.train(2);
    torch::load(run.optimizer(), file);
    for (int step = 3; step < 5; ++step) run.train(step);
  });
}

TEST_P(Optimizers, ModelSavedByTorchBetweenSteps) {
  const Expect expect = is_sharded(GetParam()) ? Expect::kRefused : Expect::kEqual;
  play(GetParam(), {.expect = expect, .says = {"torch::save of a parameter of "}, .equal_alone = true},
       [](Trainer& run) {
         for (int step = 0; step < 2; ++step) run.train(step);
         std::stringstream file;
         torch::save(run.model, file);
         run.train(2);
         Model model = run.model;
         torch::load(model, file);
         for (int step = 3; step < 5; ++step) run.train(step);
       });
}

TEST_P(Optimizers, TheOptimizersStateIsClearedHalfWay) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().state().clear();
    run.train(1);
    run.optimizer().param_groups()[0].options().set_lr(0.02);
    run.train(2);
  });
}

TEST_P(Optimizers, TheRateFollowsTheLoss) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    torch::optim::ReduceLROnPlateauScheduler scheduler(
        run.optimizer(), torch::optim::ReduceLROnPlateauScheduler::SchedulerMode::min, 0.5, 0);
    for (int step = 0; step < 5; ++step) {
      const at::Tensor loss = run.loss(step);
      scheduler.step(loss.item<float>());
      step_with(run, loss);
    }
  });
}

TEST_P(Optimizers, BiasesWithoutDecay) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    auto& group = run.optimizer().param_groups()[0];
    std::vector<at::Tensor> some, others;
    for (size_t i = 0; i < group.params().size(); ++i) (i % 2 == 0 ? some : others).push_back(group.params()[i]);
    auto options = group.options().clone();
    options->set_lr(0.03);
    group.params() = some;
    run.optimizer().add_param_group({others, std::move(options)});
    three_steps(run);
  });
}

TEST_P(Optimizers, MomentumIsForgottenThroughTheState) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      if (step != 1) continue;
      for (auto& [parameter, state] : run.optimizer().state()) {
        if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state.get())) adam->exp_avg().zero_();
        if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(state.get()))
          if (sgd->momentum_buffer().defined()) sgd->momentum_buffer().zero_();
      }
    }
  });
}

torch::nn::Linear linear(uint64_t seed) {
  return seeded(seed, [] {
    torch::nn::Linear made(kFeatures, kFeatures);
    made->to(at::kDouble);
    return made;
  });
}
at::Tensor rows(int64_t seed) {
  return seeded(100 + seed, [] { return torch::randn({kRows, kFeatures}, at::kDouble); });
}

// Another optimizer replaces the one that the wrapper was given: other ranks own the parameters now.
TEST(OptimizersOfPrograms, AnotherOptimizerUnderShardedDataParallel) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = linear(1);
    using Sgd = OSS<torch::optim::SGD>;
    auto optimizer = std::make_unique<Sgd>(model->parameters(), torch::optim::SGDOptions(0.1), comm);
    ShardedDataParallel sdp(model, *optimizer, comm);
    sdp(rows(0)).sum().backward();
    optimizer->step();
    optimizer.reset();
    optimizer =
        std::make_unique<Sgd>(std::vector<at::Tensor>{model->bias, model->weight}, torch::optim::SGDOptions(0.1), comm);
    const std::string expected = "ShardedDataParallel on rank " + std::to_string(comm->rank()) +
                                 ": the optimizer of parameter 'weight' no longer exists";
    expect_contains(error_of<std::logic_error>([&] { sdp(rows(1)); }), expected);
    expect_contains(error_of<std::logic_error>([&] { sdp.clip_grad_norm_(1); }), expected);
    const torch::NoGradGuard no_grad;  // an evaluation needs none
    EXPECT_TRUE(torch::equal(sdp(rows(1)), model(rows(1))));
    EXPECT_EQ(sdp.memory().host_bytes, 0);
  });
}

TEST_P(Optimizers, RatesBySchedulers) {
  play(GetParam(), {}, [](Trainer& run) {
    torch::optim::StepLR by_steps(run.optimizer(), /*step_size=*/1, /*gamma=*/0.5);
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      by_steps.step();
    }
  });
}

TEST_P(Optimizers, ScheduledLearningRate) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 5; ++step) {
      for (auto& group : run.optimizer().param_groups())
        group.options().set_lr(group.options().get_lr() * (step % 2 == 0 ? 0.5 : 1.5));
      run.train(step);
    }
  });
}

}  // namespace
}  // namespace tessera::loops::optimizers_test
