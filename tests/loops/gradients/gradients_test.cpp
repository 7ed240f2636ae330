// Gradients that the program scales, replaces or keeps.
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

namespace tessera::loops::gradients_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Gradients, all_setups);

TEST_P(Gradients, GradientsScaledThroughTheModulesData) {
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

// Combines the gradients of two losses by hand.
TEST_P(Gradients, GradientsOfTwoLossesPutTogether) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      std::vector<at::Tensor> first;
      run.loss(step).backward();
      for (auto& parameter : run.parameters())
        first.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      run.optimizer().zero_grad();
      run.loss(step + 3).backward();
      size_t i = 0;
      for (auto& parameter : run.parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() * 0.3 + first[i] * 0.7;
        ++i;
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Gradients, TheLossIsScaledAndUnscaledByHand) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run.loss(step) * 1024).backward();
      for (auto& group : run.optimizer().param_groups())
        for (auto& parameter : group.params())
          if (parameter.grad().defined()) parameter.grad().div_(1024);
      run.optimizer().step();
    }
  });
}

TEST_P(Gradients, GradientsWithNoise) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.grad().add_((parameter.detach() * 100).sin() * 0.01);
      run.optimizer().step();
    }
  });
}

TEST_P(Gradients, GradientsReplacedByTheirSigns) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().sign();
      run.optimizer().step();
    }
  });
}

// The weight is a root of backward beside the loss. Its gradient is in the user's tensor, which is overwritten later.
TEST_P(Gradients, APullOnAWeightInATensorThatIsUsedAgain) {
  play(GetParam(), {}, [](Trainer& run) {
    const at::Tensor weight = run.model->parameters()[2];  // of a Linear
    at::Tensor pull = torch::zeros(weight.sizes(), weight.options().requires_grad(false));
    const auto backward = [&](int step, double strength) {
      torch::autograd::backward({run.loss(step) / 2, weight}, {torch::ones({}, pull.options()), pull.fill_(strength)});
      pull.fill_(1e3);
    };
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      {
        const auto scope = run.no_sync();
        backward(2 * step, 0.05);
      }
      backward(2 * step + 1, 0.1);
      run.optimizer().step();
    }
  });
}

// The write has no effect, as in one process: a gradient that another tensor shares is not sent from its own memory.
TEST_P(Gradients, AGradientThatAHookHasKeptIsWrittenTo) {
  play(GetParam(), {}, [](Trainer& run) {
    at::Tensor kept;
    Mlp& mlp = mlp_of(*run.model);
    mlp.fc3->weight.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
    mlp.fc2->weight.register_hook([&](const at::Tensor&) {
      if (kept.defined()) kept.data().mul_(3);
    });
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// Both gradients of a sum are one tensor.
TEST_P(Gradients, TwoWeightsThatAreAddedHaveOneGradient) {
  struct Sum : Net {
    Sum() {
      slow = register_parameter("slow", torch::randn({kFeatures, kFeatures}));
      fast = register_parameter("fast", torch::randn({kFeatures, kFeatures}));
    }
    at::Tensor forward(const at::Tensor& x) override { return torch::linear(x, slow + fast); }
    at::Tensor slow, fast;
  };
  play(GetParam(), {.model = [] { return seeded_model<Sum>(6); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      if (step == 1) {
        const auto scope = run.no_sync();
        run.loss(5).backward();
      }
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Gradients, GradientsThroughTheOptimizersGroups) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      loss.backward();
      for (auto& group : run.optimizer().param_groups())
        for (auto& parameter : group.params())
          if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
      run.optimizer().step();
    }
  });
}

// Norms that are read, and gradients that are scaled by other values than a norm, are allowed.
TEST_P(Gradients, GradientsLookedAtAndScaled) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (const at::Tensor& parameter : run.parameters()) {
        if (!parameter.grad().defined()) continue;
        EXPECT_GE(parameter.grad().norm().item<double>(), 0);
        parameter.mutable_grad().mul_(0.5);
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (const at::Tensor& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(torch::tensor(0.5, torch::kDouble));
      run.optimizer().step();
    }
  });
}

const std::vector<std::string> kByHand{"has a gradient that was put there by hand"};

void put_gradients(Trainer& run, double factor) {
  for (at::Tensor& parameter : run.model->parameters())
    parameter.mutable_grad() = torch::full_like(parameter.detach(), factor);
}

TEST_P(Gradients, GradientsReplacedInTheModuleAfterBackward) {
  play(GetParam(), {.expect = unless_sharded(GetParam()), .says = kByHand}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      put_gradients(run, 0.1 + step);
      run.optimizer().step();
    }
  });
}

TEST_P(Gradients, GradientsPutIntoTheModuleBeforeTheFirstForward) {
  play(GetParam(), {.expect = unless_sharded(GetParam()), .says = kByHand}, [](Trainer& run) {
    put_gradients(run, 0.1);
    run.optimizer().step();
    run.train(0);
  });
}

TEST_P(Gradients, GradientsScaledInPlaceAndReplaced) {
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
TEST_P(Gradients, HandlesOfLastGradientsKeepTheirValues) {
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
}  // namespace tessera::loops::gradients_test
