// Evaluation, inference mode and autocast.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <limits>
#include <map>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::evaluation_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Evaluation, all_setups);

TEST_P(Evaluation, AutocastAroundForward) {
  play(GetParam(), {.model = [] { return in_single(mlp()); }, .same_data = true}, three_steps_under_autocast);
}

TEST(Autocast, RestoresThreadStateAndFreesCopiesAtTheOutermostEnd) {
  torch::nn::Linear layer(4, 4);
  const at::Tensor x = torch::ones({2, 4});
  {
    const Autocast outer(at::kCPU, at::kHalf);
    EXPECT_EQ(layer(x).scalar_type(), at::kHalf);
    {
      const Autocast inner(at::kCPU, std::nullopt, /*enabled=*/false);
      EXPECT_EQ(layer(x).scalar_type(), at::kFloat);
    }
    EXPECT_EQ(layer(x).scalar_type(), at::kHalf);
    const torch::NoGradGuard no_grad;
    layer->weight.fill_(0);  // the cached copy becomes stale
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  const Autocast again(at::kCPU);
  EXPECT_TRUE(torch::equal(layer(x), layer->bias.to(at::kBFloat16).expand({2, 4})));  // no stale copy
}

TEST(Autocast, RefusesOtherDtypes) {
  EXPECT_EQ(error_of<std::invalid_argument>([] { const Autocast autocast(at::kCPU, at::kDouble); }),
            "Autocast: dtype is Double, expected BFloat16, Half or Float");
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_P(Evaluation, OnlyEvaluated) {
  auto frozen = [] {
    Model model = mlp();
    for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
    return model;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = frozen}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.note(run.loss(step));
  });
}

// A validation before the first step, whose buffers later steps reuse.
TEST_P(Evaluation, InferenceModeBeforeTheFirstStep) {
  play(GetParam(), {}, [](Trainer& run) {
    {
      const c10::InferenceMode inference;
      run.note(run.loss(7));
    }
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      const c10::InferenceMode inference;
      run.note(run.loss(7));
    }
  });
}

// Only rank 0 validates, as only rank 0 prints. FSDP may refuse it, because the module is sharded.
TEST_P(Evaluation, RankZeroValidatesThroughTheModule) {
  play(GetParam(), {.expect = is_sharded(GetParam()) ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      const at::NoGradGuard no_grad;
      if (run.rank == 0) run.model->forward(run.x(9));
    }
  });
}

TEST_P(Evaluation, RankZeroValidatesThroughTheWrapper) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      const at::NoGradGuard no_grad;
      if (run.rank == 0) run(run.x(9));
    }
  });
}

TEST_P(Evaluation, ABackwardThroughTwoForwardsOneUnderNoGrad) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      at::Tensor target;
      {
        const torch::NoGradGuard no_grad;
        target = run(run.y(step));
      }
      step_with(run, torch::mse_loss(out, target + run.y(step)));
    }
  });
}

TEST_P(Evaluation, AnEvaluationModeStep) {
  play(GetParam(), {}, [](Trainer& run) {
    run.model->eval();
    run.train(0);
    run.model->train();
    run.train(1);
  });
}

TEST_P(Evaluation, EvaluationModeBetweenForwardAndBackward) {
  struct Normed : Mlp {
    Normed() { register_module("norm", norm); }
    at::Tensor forward(const at::Tensor& x) override { return fc3(fc2(norm(fc1(x)).tanh())); }
    torch::nn::BatchNorm1d norm{kFeatures};
  };
  play(GetParam(), {.model = [] { return seeded_model<Normed>(83); }, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.model->eval();
      {
        const torch::NoGradGuard no_grad;
        run.note(run.loss(9));
      }
      loss.backward();
      run.model->train();
      run.optimizer().step();
    }
  });
}

// Units that a validation has gathered must not be used for training after the step.
TEST_P(Evaluation, ValidationBetweenBackwardAndStep) {
  for (bool through_wrapper : {true, false}) {
    play(GetParam(), {}, [through_wrapper](Trainer& run) {
      auto validate = [&] {
        torch::NoGradGuard no_grad;
        const at::Tensor y = through_wrapper ? run(run.x(9)) : run.model->forward(run.x(9));
        run.note(torch::mse_loss(y, run.y(9)));
      };
      for (int step = 0; step < 4; ++step) {
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        loss.backward();
        validate();
        run.optimizer().step();
        validate();
      }
    });
  }
}

TEST_P(Evaluation, ValidationBetweenForwardAndBackward) {
  for (bool through_wrapper : {true, false}) {
    play(GetParam(), {}, [through_wrapper](Trainer& run) {
      for (int step = 0; step < 3; ++step) {
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        {
          torch::NoGradGuard no_grad;
          const at::Tensor y = through_wrapper ? run(run.x(9)) : run.model->forward(run.x(9));
          run.note(torch::mse_loss(y, run.y(9)));
        }
        loss.backward();
        run.optimizer().step();
      }
    });
  }
}

// A validation without NoGradGuard: its graph has no backward.
TEST_P(Evaluation, ValidationThatForgetsNoGrad) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.note(run.loss(9).detach());
    }
  });
}

TEST_P(Evaluation, WrappedInInferenceMode) {
  play(GetParam(), {}, [](Trainer& run) {
    const Model model = another_mlp();
    std::unique_ptr<Trainer> other;
    {
      const c10::InferenceMode inference;
      other = run.another(model);
    }
    three_steps(*other);
    run.note_state(*other);
  });
}

TEST_P(Evaluation, TrainingAndEvaluatingInTurn) {
  struct Dropped : Mlp {
    at::Tensor forward(const at::Tensor& x) override { return is_training() ? Mlp::forward(x) : Mlp::forward(x * 0.5); }
  };
  play(GetParam(), {.model = [] { return seeded_model<Dropped>(28); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.model->train();
      run.train(step);
      run.model->eval();
      const torch::NoGradGuard no_grad;
      run.note(run.loss(step + 10));
    }
  });
}

TEST_P(Evaluation, InferenceModeInTheMiddle) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      c10::InferenceMode inference;
      const at::Tensor y = run(run.x(9));
      run.note((y - run.y(9)).square().mean());
    }
  });
}

TEST_P(Evaluation, UnderNoGradMode) {
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

}  // namespace
}  // namespace tessera::loops::evaluation_test
