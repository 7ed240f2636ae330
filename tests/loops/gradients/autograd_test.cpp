// torch::autograd::grad(), and backward with arguments.
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
#include "tests/loops/failing_backward.h"

namespace tessera::loops::autograd_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Autograd, all_setups);

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

TEST_P(Autograd, AGradientInsideForward) {
  auto model = [] { return seeded(11, []() -> Model { return std::make_shared<WithInnerGradient>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Autograd, BackwardOfSeveralRoots) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor first = run.loss(step), second = run.loss(step + 5);
      torch::autograd::backward({first, second});
      run.optimizer().step();
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      out.backward(torch::full_like(out, 1. / static_cast<double>(out.numel())));
      run.optimizer().step();
    }
  });
}

TEST_P(Autograd, InputsMovedAgainstTheModel) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = run.x(step).requires_grad_();
      torch::mse_loss(run(x), run.y(step)).backward();
      const at::Tensor moved = (x + 0.1 * x.grad().sign()).detach();
      run.optimizer().zero_grad();
      step_with(run, torch::mse_loss(run(moved), run.y(step)));
    }
  });
}

TEST_P(Autograd, BackwardOfNoScalar) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      out.backward(2 * (out.detach() - run.y(step)) / static_cast<double>(out.numel()));
      run.optimizer().step();
    }
  });
}

// The outer loss uses the weight after a gradient step on an inner loss.
struct Inner : Net {
  Inner() { weight = register_parameter("weight", torch::randn({kFeatures, kFeatures})), register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor inner = fc(x.matmul(weight)).square().mean();
    const at::Tensor slope = torch::autograd::grad({inner}, {weight}, {}, true, /*create_graph=*/true)[0];
    return fc(x.matmul(weight - 0.5 * slope).tanh());
  }
  torch::nn::Linear fc{kFeatures, kFeatures};
  at::Tensor weight;
};

TEST_P(Autograd, AnInnerStepThatIsDifferentiated) {
  play(GetParam(), {.model = [] { return seeded_model<Inner>(45); }, .same_data = true}, three_steps);
}

struct Critic : Mlp {
  at::Tensor forward(const at::Tensor& x) override { return Mlp::forward(x).mean(1); }
};

// WGAN-GP: three forwards of the critic. The loss has the gradient of the first one by its inputs.
TEST_P(Autograd, ACriticWithAPenaltyOnItsSlope) {
  play(GetParam(), {.rounding = 10}, [](Trainer& run) {
    const Model net = seeded_model<Critic>(4);
    net->to(run.device);
    const auto critic = run.another(net);
    const auto loss = [&](int step) {
      const at::Tensor real = run.y(step), fake = run(run.x(step)).detach();
      const at::Tensor between = (0.3 * fake + 0.7 * real).requires_grad_();
      const at::Tensor slope = torch::autograd::grad({(*critic)(between).sum()}, {between}, {}, true, true)[0];
      return (*critic)(fake).mean() - (*critic)(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean();
    };
    for (int step = 0; step < 2; ++step) {
      critic->optimizer().zero_grad();
      if (step == 1) {
        const auto scope = critic->no_sync();
        loss(5).backward();
      }
      const at::Tensor value = loss(step);
      run.note(value);
      value.backward();
      critic->optimizer().step();
      critic->optimizer().zero_grad();
      run.optimizer().zero_grad();
      (-(*critic)(run(run.x(step))).mean()).backward();
      run.optimizer().step();
    }
    run.note_state(*critic);
  });
}

void look_at_inputs(Trainer& run, int step) {
  const at::Tensor x = run.x(step).requires_grad_();
  run.note(torch::autograd::grad({run(x).sum()}, {x})[0].square().sum(1).mean());
}
// The ranks must have equal rows, because these gradients are not averaged.
void look_at_parameters(Trainer& run, int step) {
  for (const at::Tensor& gradient : torch::autograd::grad({run.loss(step)}, run.model->parameters()))
    run.note(gradient.square().sum());
}

// Calls `look` at every point of a step.
void accumulate(Trainer& run, void (*look)(Trainer&, int step)) {
  for (int step = 0; step < 2; ++step) {
    run.optimizer().zero_grad();
    {
      const auto scope = run.no_sync();
      (run.loss(2 * step) / 2).backward();
      look(run, step);
    }
    look(run, step + 5);
    const at::Tensor loss = run.loss(2 * step + 1) / 2;
    look(run, step + 6);
    loss.backward();
    look(run, step + 7);
    run.clip_grad_norm_(0.05);
    run.optimizer().step();
    look(run, step + 8);
  }
}

TEST_P(Autograd, SaliencyOfInputsWhileGradientsAccumulate) {
  play(GetParam(), {}, [](Trainer& run) { accumulate(run, look_at_inputs); });
}

TEST_P(Autograd, FisherInformationWhileGradientsAccumulate) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) { accumulate(run, look_at_parameters); });
}

// Gradients may be scaled after any torch::autograd::grad().
TEST_P(Autograd, GradientsScaledAfterALookAtInputs) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      look_at_inputs(run, step);
      for (const auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.grad().mul_(0.5);
      run.optimizer().step();
    }
  });
}

TEST(AutogradOfPrograms, InputsAreLookedAtBeforeAStaticGraph) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const Model model = mlp(), alone = mlp();
    DistributedDataParallel ddp(model, comm, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      const auto rows = seeded(7 + step, [] { return torch::randn({kRows, kFeatures}, at::kDouble); });
      const at::Tensor x = rows.detach().requires_grad_();
      torch::autograd::grad({ddp(x).sum()}, {x});
      ddp.zero_grad();
      ddp(rows).square().sum().backward();
      alone->zero_grad();
      alone->forward(rows).square().sum().backward();
      for (const auto& entry : alone->named_parameters())
        EXPECT_TRUE(torch::allclose(model->named_parameters()[entry.key()].grad(), entry.value().grad()))
            << entry.key();
    }
  });
}

TEST_P(Autograd, BackwardIntoSomeParametersOnly) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      const auto wanted = mlp_of(*run.model).fc2->parameters();
      loss.backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/false, wanted);
      run.optimizer().step();
    }
  });
}

TEST_P(Autograd, ALossOfGradientsBySecondBackward) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      at::Tensor penalty = torch::zeros({}, at::kDouble);
      for (const auto& gradient : torch::autograd::grad({loss}, run.model->parameters(), {}, true, true))
        penalty = penalty + gradient.square().sum();
      (loss + 0.1 * penalty).backward();
      run.optimizer().step();
    }
  });
}

// Curvature along the gradient, by which the step is scaled.
TEST_P(Autograd, AHessianVectorProduct) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      const auto parameters = run.model->parameters();
      const auto gradients = torch::autograd::grad({loss}, parameters, {}, true, true);
      at::Tensor along = torch::zeros({}, at::kDouble);
      for (const auto& gradient : gradients) along = along + (gradient * gradient.detach()).sum();
      at::Tensor curvature = torch::zeros({}, at::kDouble);
      for (const auto& product : torch::autograd::grad({along}, parameters, {}, true))
        curvature += product.square().sum();
      run.note(curvature);
      (loss / (1 + curvature.sqrt())).backward();
      run.optimizer().step();
    }
  });
}

// Input gradients in an evaluation: saliency maps, adversarial examples.
TEST_P(Autograd, GradientsOfInputsOnly) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      const at::Tensor x = run.x(9).requires_grad_();
      const at::Tensor slope = torch::autograd::grad({run.model->forward(x).square().sum()}, {x})[0];
      run.note(slope.square().mean());
      run.optimizer().zero_grad();
    }
  });
}

// WGAN-GP: the gradient's own gradient.
TEST_P(Autograd, GradientPenalty) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      at::Tensor x = run.x(step).requires_grad_();
      at::Tensor y = run(x);
      const at::Tensor slope = torch::autograd::grad({y.square().sum()}, {x}, {}, true, true)[0];
      (torch::mse_loss(y, run.y(step)) + 0.1 * slope.square().sum(1).mean()).backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::autograd_test
