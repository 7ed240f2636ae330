// requires_grad_() at any time.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/library.h>
#include <future>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::freezing_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Freezing, all_setups);

TEST_P(Freezing, FrozenInTheModuleAndThawedInTheParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    for (at::Tensor& parameter : mlp_of(*run.model).fc2->parameters()) parameter.requires_grad_(false);
    for (at::Tensor& parameter : run.parameters()) parameter.requires_grad_(true);
    for (int step = 1; step < 3; ++step) run.train(step);
    for (at::Tensor& parameter : run.parameters()) EXPECT_TRUE(parameter.requires_grad());
  });
}

struct WithLowRank : Mlp {
  WithLowRank() {
    for (auto& parameter : fc2->parameters()) parameter.requires_grad_(false);
    down = register_parameter("down", torch::randn({kFeatures, 2}) * 0.1);
    up = register_parameter("up", torch::zeros({2, kFeatures}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    return fc3(fc2(h) + h.matmul(down).matmul(up));
  }
  at::Tensor down, up;
};

TEST_P(Freezing, AdaptersBesideFrozenWeights) {
  play(GetParam(), {.model = [] { return seeded_model<WithLowRank>(49); }}, three_steps);
}

TEST_P(Freezing, FrozenThroughTheWrapperBetweenForwardAndBackward) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    at::Tensor weight = run.parameters()[2];
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      weight.requires_grad_(false);
      loss.backward();
      weight.requires_grad_(true);
      run.optimizer().step();
    }
  });
}

TEST_P(Freezing, FrozenThroughTheWrapperBetweenBackwardAndStep) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    at::Tensor weight = run.parameters()[2];
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      weight.requires_grad_(false);
      run.optimizer().step();
      weight.requires_grad_(true);
    }
  });
}

TEST_P(Freezing, LayersThawOneAfterAnotherWhileGradientsAccumulate) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    set_frozen(*net.fc1, true);
    set_frozen(*net.fc2, true);
    for (int step = 0; step < 5; ++step) {
      if (step == 1) set_frozen(*net.fc2, false);
      if (step == 3) set_frozen(*net.fc1, false);
      {
        const ScopeExit alone = run.no_sync();
        (run.loss(2 * step) / 2).backward();
      }
      step_with(run, run.loss(2 * step + 1) / 2);
    }
  });
}

// Amid an accumulation.
TEST_P(Freezing, ALayerThawsBetweenTwoParts) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      set_frozen(*net.fc2, step % 2 == 0);
      {
        const ScopeExit alone = run.no_sync();
        run.loss(2 * step).backward();
      }
      set_frozen(*net.fc2, step % 2 == 1);
      step_with(run, run.loss(2 * step + 1));
    }
  });
}

// A frozen layer must have no gradient, not even zeros: with zeros, its momentum would still change it.
void train_with_a_frozen_layer(Trainer& run, const std::function<void(Mlp&)>& freeze) {
  auto& net = mlp_of(*run.model);
  run.train(0);
  freeze(net);
  for (int step = 4; step < 7; ++step) run.train(step);
  set_frozen(*net.fc2, false);
  run.train(7);
}

TEST_P(Freezing, ALayerIsFrozenAfterAForwardThatWasForLooking) {
  for (const bool unused : {false, true})
    play(GetParam(), {.unused = unused}, [](Trainer& run) {
      train_with_a_frozen_layer(run, [&](Mlp& net) {
        run.note(run.loss(1).detach());
        set_frozen(*net.fc2, true);
      });
    });
}

TEST_P(Freezing, ALayerIsFrozenAfterAForwardThatThrew) {
  play(GetParam(), {}, [](Trainer& run) {
    train_with_a_frozen_layer(run, [&](Mlp& net) {
      EXPECT_ANY_THROW(run(torch::ones({2, kFeatures + 1}, at::kDouble)));
      set_frozen(*net.fc2, true);
    });
  });
}

TEST_P(Freezing, ALayerIsFrozenAndWhatNoSyncGatheredIsCleared) {
  play(GetParam(), {}, [](Trainer& run) {
    train_with_a_frozen_layer(run, [&](Mlp& net) {
      run.optimizer().zero_grad();
      {
        const ScopeExit alone = run.no_sync();
        run.loss(1).backward();
      }
      set_frozen(*net.fc2, true);
      run.optimizer().zero_grad();
    });
  });
}

TEST_P(Freezing, ALayerIsFrozenForAValidationBetweenTwoParts) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      {
        const ScopeExit alone = run.no_sync();
        run.loss(3 * step).backward();
      }
      set_frozen(*net.fc2, true);
      run.note(run.loss(3 * step + 1).detach());
      set_frozen(*net.fc2, false);
      run.loss(3 * step + 2).backward();
      run.optimizer().step();
    }
  });
}

struct LowRank : Net {
  LowRank() {
    register_module("base", base);
    register_module("head", head);
    down = register_parameter("down", torch::randn({kFeatures, 2}) * 0.1);
    up = register_parameter("up", torch::zeros({2, kFeatures}));
    for (auto& parameter : base->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = checkpointed(
        [this](const at::Tensor& input) { return (base(input) + input.matmul(down).matmul(up)).tanh(); }, x);
    return head(checkpointed([this](const at::Tensor& input) { return base(input).tanh(); }, h));
  }
  torch::nn::Linear base{kFeatures, kFeatures}, head{kFeatures, kFeatures};
  at::Tensor down, up;
};

// The frozen base is used twice, computed again in backward, and thaws in the end.
TEST_P(Freezing, ACheckpointedFrozenBaseWithAdapters) {
  play(GetParam(), {.model = [] { return seeded_model<LowRank>(84); }, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      if (step == 3) set_frozen(*dynamic_cast<LowRank&>(*run.model).base, false);
      {
        const ScopeExit alone = run.no_sync();
        const at::Tensor x = run.x(2 * step).requires_grad_();
        torch::mse_loss(run(x), run.y(2 * step)).backward();
      }
      step_with(run, torch::mse_loss(run(run.x(2 * step + 1).requires_grad_()), run.y(2 * step + 1)));
    }
  });
}

// The optimizer has some of the parameters; those of a thawed layer are added as a group.
TEST_P(Freezing, AGroupForEachLayerThatThaws) {
  if (GetParam().stage == 2 || GetParam().stage == 1) return;  // OSS is the optimizer there
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    set_frozen(*net.fc1, true);
    set_frozen(*net.fc2, true);
    const auto all = run.parameters();
    torch::optim::Adam optimizer(std::vector<at::Tensor>{all[4], all[5]}, torch::optim::AdamOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        set_frozen(*net.fc2, false);
        optimizer.add_param_group(torch::optim::OptimizerParamGroup({all[2], all[3]}));
      }
      optimizer.zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss.detach());
      loss.backward();
      optimizer.step();
    }
  });
}

TEST_P(Freezing, AGroupIsAddedWhenItsLayerIsThawed) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({2}, at::kDouble)}));
    run.train(1);
  });
}

TEST_P(Freezing, FrozenThroughTheModuleBetweenSteps) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      mlp_of(*run.model).fc2->weight.requires_grad_(step % 3 == 0);
      run.train(step);
    }
  });
}

TEST_P(Freezing, FrozenThroughTheWrapperBetweenSteps) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      run.parameters()[2].requires_grad_(step % 3 == 0);
      run.train(step);
    }
  });
}

TEST_P(Freezing, FrozenBetweenForwardAndBackward) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    at::Tensor weight = mlp_of(*run.model).fc2->weight;
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      weight.requires_grad_(false);
      loss.backward();
      weight.requires_grad_(true);
      run.optimizer().step();
    }
  });
}

// The optimizer steps every parameter that has a gradient, frozen or not.
TEST_P(Freezing, FrozenBetweenBackwardAndStep) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    at::Tensor weight = mlp_of(*run.model).fc2->weight;
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      weight.requires_grad_(false);
      run.optimizer().step();
      weight.requires_grad_(true);
    }
  });
}

TEST_P(Freezing, FrozenFromTheBeginning) {
  auto frozen = [] {
    Model model = mlp();
    for (auto& parameter : mlp_of(*model).fc1->parameters()) parameter.requires_grad_(false);
    return model;
  };
  play(GetParam(), {.model = frozen}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// The model unfreezes its own layer in forward. FSDP refuses this for a unit that is already in use.
TEST_P(Freezing, UnfrozenInsideForward) {
  auto frozen = [] {
    Model model = mlp();
    for (auto& parameter : mlp_of(*model).fc2->parameters()) parameter.requires_grad_(false);
    return model;
  };
  play(GetParam(),
       {.expect = GetParam().stage == 3 ? Expect::kEither : Expect::kEqual,
        .model = frozen,
        .unused = true,
        .says = {"was unfrozen in forward after the first use of its unit"}},
       [](Trainer& run) {
         Mlp& net = mlp_of(*run.model);
         for (int step = 0; step < 4; ++step) {
           net.in_forward = [&net, step] {
             for (auto& parameter : net.fc2->parameters()) parameter.requires_grad_(step > 1);
           };
           run.train(step);
         }
         net.in_forward = nullptr;
       });
}

TEST_P(Freezing, FrozenInsideForward) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 6; ++step) {
      net.in_forward = [&net, step] {
        for (auto& parameter : net.fc2->parameters()) parameter.requires_grad_(step % 3 == 0);
      };
      run.train(step);
    }
    net.in_forward = nullptr;
  });
}

// A forward that threw must not affect the next one.
TEST_P(Freezing, FrozenAfterAForwardThatThrew) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      net.in_forward = [] { throw std::runtime_error("the user's exception"); };
      EXPECT_THROW(run.loss(step), std::runtime_error);
      net.in_forward = nullptr;
      net.fc2->weight.requires_grad_(step % 2 == 0);
      run.train(step);
    }
  });
}

}  // namespace
}  // namespace tessera::loops::freezing_test
