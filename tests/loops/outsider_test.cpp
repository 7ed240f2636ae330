// Loops of somebody who knows libtorch and has not read the documentation: other data for the wrapper's parameters,
// states that forward changes through its arguments, another optimizer half way, rows for experts that others have not.
#include "tests/loops/loops.h"

namespace tessera::loops::outsider_test {
namespace {

TESSERA_LOOPS(Outsider, all_setups);

// ---- other data for the wrapper's parameters

std::vector<at::Tensor> halves(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) values.push_back(parameter.detach() * 0.5);
  return values;
}

TEST_P(Outsider, AVectorForTheWrappersParameters) {
  const bool is_sharded = GetParam().stage == 3;
  play(GetParam(),
       {.expect = is_sharded ? Expect::kRefused : Expect::kEqual,
        .says = {"was replaced after wrapping (by set_data() on fsdp.parameters())"}},
       [](Trainer& run) {
         const auto halve = [&run] {
           const auto values = torch::nn::utils::parameters_to_vector(halves(run.parameters()));
           torch::nn::utils::vector_to_parameters(values, run.parameters());
         };
         run.train(0);
         halve();
         run.note_state(run);  // before a forward has seen them
         run.train(1);
         run.optimizer().zero_grad();
         run.loss(2).backward();
         halve();
         run.optimizer().step();
         run.train(3);
         halve();
       });
}

TEST_P(Outsider, OtherDataForOneOfTheWrappersParameters) {
  const bool is_sharded = GetParam().stage == 3;
  play(GetParam(),
       {.expect = is_sharded ? Expect::kRefused : Expect::kEqual,
        .says = {"was replaced after wrapping (by set_data() on fsdp.parameters())"}},
       [](Trainer& run) {
         run.train(0);
         at::Tensor one = run.parameters()[2];
         one.set_data(one.detach() * 0.5);
         for (int step = 1; step < 4; ++step) run.train(step);
       });
}

TEST_P(Outsider, OtherDataForTheWrappersParametersBeforeBackward) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    const at::Tensor loss = run.loss(1);
    const auto values = halves(run.parameters());
    for (size_t i = 0; i < values.size(); ++i) run.parameters()[i].set_data(values[i]);
    loss.backward();
    run.optimizer().step();
    run.train(2);
  });
}

void swap_data(at::Tensor one, at::Tensor other) {
  const at::Tensor data = one.data();
  one.set_data(other.data());
  other.set_data(data);
}

TEST_P(Outsider, TwoOfTheWrappersParametersSwapTheirData) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto parameters = run.parameters();
    swap_data(parameters[0], parameters[2]);
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(Outsider, AnAverageSwapsItsDataWithTheWrappersParameters) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto average = halves(run.parameters());
    for (int step = 1; step < 4; ++step) {
      const auto parameters = run.parameters();
      for (size_t i = 0; i < average.size(); ++i) swap_data(parameters[i], average[i]);
      run.train(step);
    }
  });
}

// ---- modules

TEST_P(Outsider, WrappedInInferenceMode) {
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

TEST_P(Outsider, ALayerIsReplacedAndTheModelSaved) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    auto& net = mlp_of(*run.model);
    const Model other = another_mlp();
    other->to(run.device);
    net.fc2 = net.replace_module("fc2", mlp_of(*other).fc2);
    if (run.shards() != nullptr) run.note(run.shards()->shards_to_save()[2].tensor.detach().abs().mean());
    run.state();
  });
}

TEST_P(Outsider, ABackwardWhoseWrapperHasGone) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    const Model model = another_mlp();
    at::Tensor loss;
    {
      const auto other = run.another(model);
      loss = other->loss(0);
    }
    loss.backward();
    for (const auto& parameter : model->parameters()) run.note(parameter.grad().square().sum());
  });
}

// Each row is one of four experts', who are called where they have rows.
struct Experts : Net {
  Experts() {
    for (int i = 0; i < 4; ++i) experts->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("gate", gate);
    register_module("experts", experts);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = gate(x).tanh();
    const at::Tensor whose = (x.select(1, 0) > 0).to(at::kLong) + 2 * (x.select(1, 1) > 0).to(at::kLong);
    at::Tensor out = torch::zeros_like(h);
    for (int i = 0; i < 4; ++i) {
      const at::Tensor rows = (whose == i).nonzero().squeeze(1);
      if (rows.numel() > 0)
        out = out.index_add(0, rows, experts[i]->as<torch::nn::Linear>()->forward(h.index_select(0, rows)));
    }
    return out;
  }
  torch::nn::Linear gate{kFeatures, kFeatures};
  torch::nn::ModuleList experts;
};
const Play kExperts{.expect = Expect::kEither, .model = [] { return seeded_model<Experts>(301); }, .unused = true};

TEST_P(Outsider, ExpertsThatSomeRanksHaveNoRowsFor) {
  if (GetParam().stage < 3) play(GetParam(), kExperts, three_steps);  // where units are gathered: evaluated, below
}

TEST_P(Outsider, ExpertsThatSomeRanksHaveNoRowsForEvaluated) {
  play(GetParam(), kExperts, [](Trainer& run) {
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 4; ++step) run.note(run.loss(step));
  });
}

// ---- what is not made by one setup

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

// The optimizer that the wrapper was given goes, another takes its place: other ranks own the parameters now.
TEST(OutsiderOwn, AnotherOptimizerUnderShardedDataParallel) {
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

// Modules that give what they have to say by their arguments.
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

TEST(OutsiderOwn, AStateThatForwardIsGivenAndChanges) {
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

TEST(OutsiderOwn, AStateThatACheckpointedFunctionChanges) {
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

TEST(OutsiderOwn, AForwardThatGivesNothing) {
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
}  // namespace tessera::loops::outsider_test
