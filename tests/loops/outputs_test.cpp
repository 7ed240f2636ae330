// Inputs and outputs of forward.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::loops::outputs_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Outputs, all_setups);

TEST_P(Outputs, CalledUponItsOwnOutput) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      at::Tensor h = run.x(step);
      for (int i = 0; i < 3; ++i) h = run(h);
      step_with(run, torch::mse_loss(h, run.y(step)));
    }
  });
}

TEST_P(Outputs, OutputsChangedInPlace) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      at::Tensor out = run(run.x(step));
      out.mul_(2).add_(1).relu_();
      step_with(run, torch::mse_loss(out, run.y(step)));
    }
  });
}

struct Penal : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    kept = fc2->weight;
    return Mlp::forward(x);
  }
  at::Tensor kept;
};

TEST_P(Outputs, AWeightKeptByForwardAndUsedInTheLoss) {
  play(GetParam(), {.model = [] { return seeded_model<Penal>(31); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = torch::mse_loss(run(run.x(step)), run.y(step));
      step_with(run, loss + dynamic_cast<Penal&>(*run.model).kept.square().mean());
    }
  });
}

struct Identity : Net {
  Identity() { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) override { return skip ? x : fc(x); }
  torch::nn::Linear fc{kFeatures, kFeatures};
  bool skip = false;
};

TEST_P(Outputs, AForwardThatGivesItsInput) {
  play(GetParam(), {.model = [] { return seeded_model<Identity>(32); }, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      dynamic_cast<Identity&>(*run.model).skip = step == 1;
      const at::Tensor x = run.x(step).requires_grad_();
      step_with(run, torch::mse_loss(run(x), run.y(step)));
    }
  });
}

// All ranks read the loss first, and skip backward and step in the same iterations.
TEST_P(Outputs, GraphsThrownAwayWithoutABackward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      if (step % 2 == 1) continue;
      loss.backward();
      run.optimizer().step();
    }
  });
}

// Two stages joined by a detached leaf, as in pipelines.
struct TwoStages : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    first = fc1(x).tanh();
    second = first.detach().requires_grad_();
    return fc3(fc2(second).tanh());
  }
  at::Tensor first, second;
};

TEST_P(Outputs, ABackwardInTwoStages) {
  play(GetParam(), {.expect = Expect::kEither, .model = [] { return seeded_model<TwoStages>(41); }, .unused = true},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           auto& net = dynamic_cast<TwoStages&>(*run.model);
           const at::Tensor loss = run.loss(step);
           run.note(loss.detach());
           loss.backward();
           net.first.backward(net.second.grad());
           run.optimizer().step();
         }
       });
}

TEST_P(Outputs, LayersCalledPastForward) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = net.fc3(net.fc2(net.fc1(run.x(step)).tanh()).tanh());
      step_with(run, torch::mse_loss(out, run.y(step)));
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

// A module that returns results through its arguments.
struct Cell : torch::nn::Module {
  Cell() {
    register_module("own", own);
    register_module("before", before);
  }
  at::Tensor forward(const at::Tensor& x, at::Tensor& state, std::vector<at::Tensor>& states, at::Tensor seen) {
    state = torch::tanh(own(x) + before(state));
    states.push_back(state);
    const torch::NoGradGuard no_grad;
    seen.add_(state.mean(0));
    return state;
  }
  torch::nn::Linear own = linear(5), before = linear(6);
};

struct Told {
  at::Tensor seen = torch::zeros({kFeatures}, at::kDouble);
  double states = 0;
  std::vector<at::Tensor> values;
};

Told train_cell(
    const std::function<at::Tensor(const at::Tensor&, at::Tensor&, std::vector<at::Tensor>&, at::Tensor)>& call,
    std::vector<at::Tensor> parameters) {
  Told told;
  torch::optim::SGD optimizer(std::move(parameters), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    at::Tensor state = torch::zeros({kRows, kFeatures}, at::kDouble), loss = torch::zeros({}, at::kDouble);
    std::vector<at::Tensor> states;
    for (int at = 0; at < 3; ++at) loss = loss + call(rows(3 * step + at), state, states, told.seen).square().mean();
    for (const at::Tensor& each : states) told.states += each.abs().sum().item<double>();
    loss.backward();
    optimizer.step();
  }
  return told;
}

TEST(OutputsOfPrograms, AStateThatForwardIsGivenAndChanges) {
  Cell alone;
  const auto with = [](auto& cell) {
    return [&cell](const at::Tensor& x, at::Tensor& state, std::vector<at::Tensor>& states, at::Tensor seen) {
      return cell.forward(x, state, states, std::move(seen));
    };
  };
  const Told expected = train_cell(with(alone), alone.parameters());
  for (const bool converts : {false, true}) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
      if (converts) options.mixed_precision = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble};
      FullyShardedDataParallel fsdp(std::make_shared<Cell>(), comm, options);
      const Told told = train_cell(with(fsdp), fsdp.parameters());
      EXPECT_NEAR(told.states, expected.states, 1e-3) << converts;
      EXPECT_TRUE(torch::allclose(told.seen, expected.seen, 1e-4, 1e-5)) << converts;
      for (const auto& parameter : fsdp.full_state_dict())
        EXPECT_TRUE(torch::allclose(parameter.value(), alone.named_parameters()[parameter.key()], 1e-4, 1e-5))
            << parameter.key() << " " << converts;
    });
  }
}

TEST(OutputsOfPrograms, AStateThatACheckpointedFunctionChanges) {
  auto layer = linear(5);
  const auto replaces = [&](const at::Tensor& x, at::Tensor& state) { return state = torch::tanh(layer(x) + state); };
  at::Tensor state = torch::zeros({kRows, kFeatures}, at::kDouble);
  expect_contains(error_of<std::invalid_argument>([&] { checkpointed(replaces, rows(0), state); }),
                  "put another tensor in the place of tensor 0 of what it takes by reference");
  const auto extends = [&](const at::Tensor& x, std::vector<at::Tensor>& states) {
    states.push_back(layer(x));
    return states.back() * 2;
  };
  std::vector<at::Tensor> states;
  expect_contains(error_of<std::invalid_argument>([&] { checkpointed(extends, rows(0), states); }),
                  "put another tensor in the place of tensor 0");
  const auto own_variable = [&](at::Tensor x) {
    x = layer(x);
    return x.tanh();
  };
  at::Tensor x = rows(0);
  EXPECT_TRUE(torch::equal(checkpointed(own_variable, x), own_variable(x)));
}

struct GivesNothing : torch::nn::Module {
  GivesNothing() { register_module("layer", layer); }
  void forward(const at::Tensor& x) { out = layer(x); }
  torch::nn::Linear layer = linear(5);
  at::Tensor out;
};

TEST(OutputsOfPrograms, AForwardThatGivesNothing) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (int stage = 0; stage <= 3; ++stage) {
      const auto module = std::make_shared<GivesNothing>();
      auto model = zero(module, torch::optim::SGDOptions(0.1), comm, {.stage = stage});
      model(rows(0));
      module->out.sum().backward();
      model.step();
      const auto alone = std::make_shared<GivesNothing>();
      alone->forward(rows(0));
      alone->out.sum().backward();
      const at::Tensor expected = alone->layer->bias - 0.1 * alone->layer->bias.grad();
      EXPECT_TRUE(torch::allclose(model.full_state_dict()["layer.bias"], expected)) << stage;
    }
  });
}

}  // namespace
}  // namespace tessera::loops::outputs_test
