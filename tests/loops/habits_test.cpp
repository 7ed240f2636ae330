// What programs do beside forward, backward and step: optimizers by hand, threads, state of optimizers, mixed modes.
#include <ATen/autocast_mode.h>

#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Habits, all_setups);

bool is_sharded(const Setup& setup) { return setup.stage == 3; }

// ---- optimizers by hand

// Under stage 2 a gradient is at its owner alone, so a step by hand is too, and OSS is who would tell the others.
bool steps_by_hand(const Setup& setup) { return setup.stage != 2; }

// In two groups, a layer left out at first (whose momentum begins later), gradients zeroed in place, a look in between,
// a step given up. The one process has torch's.
TEST_P(Habits, AFusedOptimizerOfOnesOwn) {
  const bool works = steps_by_hand(GetParam());
  play(GetParam(),
       {.expect = works ? Expect::kEqual : Expect::kRefused,
        .unused = true,
        .says = {kByOther[0], "the ranks have diverged"},  // where ranks notice at different points
        .equal_alone = true},
       [](Trainer& run) {
         std::vector<at::Tensor> parameters = run.parameters();
         const at::Tensor last = parameters.back();
         parameters.pop_back();
         const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
         std::unique_ptr<torch::optim::SGD> optimizer = run.shards() == nullptr
                                                            ? std::make_unique<torch::optim::SGD>(parameters, options)
                                                            : std::make_unique<tessera::SGD>(parameters, options);
         optimizer->add_param_group({{last}, std::make_unique<torch::optim::SGDOptions>(0.01)});
         for (int step = 0; step < 4; ++step) {
           mlp_of(*run.model).skip_fc2 = step == 0;
           optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
           run.loss(step).backward();
           {
             const at::NoGradGuard no_grad;
             run.note(run.loss(step + 10));
           }
           if (step != 2) optimizer->step();
         }
       });
}

TEST_P(Habits, DescentByHand) {
  const bool works = steps_by_hand(GetParam());
  play(GetParam(), {.expect = works ? Expect::kEqual : Expect::kRefused, .says = kByOther, .equal_alone = true},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.zero_grad();
           run.loss(step).backward();
           const at::NoGradGuard no_grad;
           for (auto& parameter : run.parameters())
             if (parameter.grad().defined()) parameter.sub_(0.1 * parameter.grad());
         }
       });
}

TEST_P(Habits, DescentByHandThroughTheModulesData) {
  if (!steps_by_hand(GetParam())) GTEST_SKIP() << "gradients are at their owners alone (docs/loops.md)";
  play(GetParam(),
       {.expect = is_sharded(GetParam()) ? Expect::kRefused : Expect::kEqual, .says = {"is in the wrapper's shards"}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.model->zero_grad();
           run.loss(step).backward();
           for (auto& parameter : run.model->parameters()) parameter.data().sub_(0.1 * parameter.grad());
         }
       });
}

TEST_P(Habits, GradientsScaledThroughTheModulesData) {
  play(GetParam(),
       {.expect = is_sharded(GetParam()) ? Expect::kRefused : Expect::kEqual, .says = {"is in the wrapper's shards"}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           run.loss(step).backward();
           for (auto& parameter : run.model->parameters())
             if (parameter.grad().defined()) parameter.grad().data().mul_(0.5);
           run.optimizer().step();
         }
       });
}

TEST_P(Habits, GradientsClippedByValue) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      torch::nn::utils::clip_grad_value_(run.parameters(), 1e-2);
      run.optimizer().step();
    }
  });
}

TEST_P(Habits, GradientsClearedOneByOne) {
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

// ---- optimizers and their state

TEST_P(Habits, StepBeforeAnyBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    run.optimizer().step();
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Habits, TwoStepsOfOneBackward) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.optimizer().step();
    }
  });
}

// Each rank its own, into memory, as a program of one process does.
TEST_P(Habits, OptimizerSavedAndLoadedByTorch) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) run.train(step);
    std::stringstream file;
    torch::save(run.optimizer(), file);
    run.train(2);
    torch::load(run.optimizer(), file);
    for (int step = 3; step < 5; ++step) run.train(step);
  });
}

TEST_P(Habits, ModelSavedByTorchBetweenSteps) {
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

// ---- modes

TEST_P(Habits, AutocastAroundForward) {
  auto single = [] {
    Model model = mlp();
    model->to(at::kFloat);
    return model;
  };
  play(GetParam(), {.model = single, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor out = run(run.x(step).to(at::kFloat));
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      torch::mse_loss(out.to(at::kFloat), run.y(step).to(at::kFloat)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Habits, OnlyEvaluated) {
  auto frozen = [] {
    Model model = mlp();
    for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
    return model;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = frozen}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.note(run.loss(step));
  });
}

// The first validation comes before the first step, which makes all that later steps use.
TEST_P(Habits, InferenceModeBeforeTheFirstStep) {
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

// Rank 0 alone validates, as it alone prints: through the module where that is a whole one.
TEST_P(Habits, RankZeroValidatesThroughTheModule) {
  play(GetParam(), {.expect = is_sharded(GetParam()) ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      const at::NoGradGuard no_grad;
      if (run.rank == 0) run.model->forward(run.x(9));
    }
  });
}

TEST_P(Habits, RankZeroValidatesThroughTheWrapper) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      const at::NoGradGuard no_grad;
      if (run.rank == 0) run(run.x(9));
    }
  });
}

// Its loss was not finite, say.
TEST_P(Habits, TheLastRankLeavesOutABackward) {
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

// ---- threads

TEST_P(Habits, EachPartOfAStepInAThreadOfItsOwn) {
  play(GetParam(), {}, [](Trainer& run) {
    auto in_thread = [](auto work) {
      std::exception_ptr error;
      std::thread([&] {
        try {
          work();
        } catch (...) {
          error = std::current_exception();
        }
      }).join();
      if (error) std::rethrow_exception(error);
    };
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss;
      in_thread([&] { run.optimizer().zero_grad(); });
      in_thread([&] { loss = run.loss(step); });
      in_thread([&] { loss.backward(); });
      in_thread([&] { run.optimizer().step(); });
    }
  });
}

// One thread for the whole run that looks whenever the loop lets it, and has an error of its own in between.
TEST_P(Habits, AThreadThatValidatesByTurns) {
  play(GetParam(), {}, [](Trainer& run) {
    std::binary_semaphore turn{0}, back{0};
    std::exception_ptr error;
    std::jthread validator([&] {
      for (int step = 0; step < 3; ++step) {
        turn.acquire();
        try {
          const at::NoGradGuard no_grad;
          run.note(run.loss(step + 10));
          throw std::runtime_error("no room for a plot");
        } catch (const std::runtime_error& caught) {
          if (std::string(caught.what()) != "no room for a plot") error = std::current_exception();
        } catch (...) {
          error = std::current_exception();
        }
        back.release();
      }
    });
    for (int step = 0; step < 3; ++step) {
      if (!error) run.train(step);
      turn.release();
      back.acquire();
    }
    if (error) std::rethrow_exception(error);
  });
}

// ---- models

// An energy whose features are gradients of another part, taken inside forward.
struct WithInnerGradient : Net {
  WithInnerGradient() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("fc3", fc3);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    const at::Tensor leaf = h.detach().requires_grad_();
    at::Tensor slope;
    {
      const at::AutoGradMode recording(true);
      slope = torch::autograd::grad({fc2(leaf).tanh().sum()}, {leaf})[0];
    }
    return fc3(h + fc2(slope));
  }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures}, fc3{kFeatures, kFeatures};
};

TEST_P(Habits, AGradientInsideForward) {
  auto model = [] { return seeded(11, []() -> Model { return std::make_shared<WithInnerGradient>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// Weights that are computed from others, as weight norm does, put where a layer looks for its own.
struct Normalised : Net {
  Normalised() {
    register_module("fc1", fc1);
    g = register_parameter("g", torch::ones({kFeatures, 1}));
    v = register_parameter("v", torch::randn({kFeatures, kFeatures}));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor weight = g * v / v.data().norm();
    return torch::nn::functional::linear(fc1(x).tanh(), weight, fc1->bias) + x.matmul(fc1->weight[0].unsqueeze(1));
  }
  torch::nn::Linear fc1{kFeatures, kFeatures};
  at::Tensor g, v;
};

TEST_P(Habits, WeightsComputedFromOthersAndTheirData) {
  auto model = [] { return seeded(12, []() -> Model { return std::make_shared<Normalised>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// A view of a weight, taken once after wrapping.
TEST_P(Habits, AViewOfAWeightKeptOverSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    const at::Tensor transposed = mlp_of(*run.model).fc2->weight.detach().t();
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.note(transposed.square().mean());
    }
  });
}

struct Mixed : Net {
  Mixed() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    numbers = register_parameter("numbers", at::arange(kFeatures), /*requires_grad=*/false);
    flags = register_parameter("flags", at::ones({3}, at::kBool), /*requires_grad=*/false);
    fc1->to(at::kFloat);
    fc2->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return fc2(fc1(x.to(at::kFloat)).tanh().to(at::kDouble) + numbers / kFeatures) * flags.sum() / 3;
  }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
  at::Tensor numbers, flags;
};

TEST_P(Habits, ParametersOfManyTypes) {
  auto model = [] { return seeded(13, []() -> Model { return std::make_shared<Mixed>(); }); };
  play(GetParam(), {.expect = Expect::kEither, .model = model, .same_data = true, .optimizers = {Optim::kSgd}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) run.train(step);
       });
}

// A second model copied from the first as clone() does. clone() calls reset(), which draws nothing: other ranks draw
// their rows from torch's one generator meanwhile.
struct Copyable : torch::nn::Cloneable<Copyable> {
  Copyable() {
    reset();
    torch::nn::init::normal_(weight);
  }
  void reset() override { weight = register_parameter("weight", torch::empty({kFeatures, kFeatures}, at::kDouble)); }
  at::Tensor weight;
};
struct WithClone : Net {
  WithClone() { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) override { return x.matmul(inner->weight).tanh(); }
  std::shared_ptr<Copyable> inner = std::make_shared<Copyable>();
};

TEST_P(Habits, AModuleClonedBetweenSteps) {
  auto model = [] { return seeded(14, []() -> Model { return std::make_shared<WithClone>(); }); };
  play(GetParam(), {.expect = is_sharded(GetParam()) ? Expect::kEither : Expect::kEqual, .model = model},
       [](Trainer& run) {
         run.train(0);
         const auto copy = std::dynamic_pointer_cast<Copyable>(dynamic_cast<WithClone&>(*run.model).inner->clone());
         run.train(1);
         run.note(run.x(5).matmul(copy->weight).mean());
         run.train(2);
       });
}

}  // namespace
}  // namespace tessera::loops
