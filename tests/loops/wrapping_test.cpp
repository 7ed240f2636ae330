// Modules that are wrapped at odd times, or change after wrapping.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>
#include <future>
#include <limits>
#include <map>
#include <optional>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::wrapping_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Wrapping, all_setups);

// A module with clone(), which calls reset(). reset() draws nothing, because ranks are threads and share torch's
// default generator.
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

// Returns a wrapper around another model, whose gradients are all 0.25 already.
std::unique_ptr<Trainer> another_with_gradients(Trainer& run) {
  const Model model = another_mlp();
  for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = torch::full_like(parameter, 0.25);
  return run.another(model);
}

TEST_P(Wrapping, AModuleClonedBetweenSteps) {
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

TEST_P(Wrapping, AModuleReplacedAfterWrapping) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    auto& net = mlp_of(*run.model);
    net.fc3 = net.replace_module("fc3", mlp_of(*another_mlp()).fc3);
    run.train(1);
    run.train(2);
  });
}

TEST_P(Wrapping, AModuleTakenOutAfterWrapping) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    run.train(0);
    auto& net = mlp_of(*run.model);
    net.unregister_module("fc2");
    net.skip_fc2 = true;
    run.train(1);
    run.train(2);
  });
}

TEST_P(Wrapping, TheModelAfterItsWrapperHasGone) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    const Model model = another_mlp();
    {
      auto other = run.another(model);
      other->train(0);
    }
    const torch::NoGradGuard no_grad;
    run.note(torch::mse_loss(model->forward(run.x(1)), run.y(1)));
    run.note(model->parameters()[0].square().sum());
  });
}

TEST_P(Wrapping, GradientsFromBeforeWrappingStay) {
  play(GetParam(), {}, [](Trainer& run) {
    const Model model = another_mlp();
    double value = 0.25;
    for (at::Tensor& parameter : model->parameters())  // of other strides, where it has two dimensions
      if ((value += 0.25) != 0.75) parameter.mutable_grad() = torch::full_like(parameter.t(), value).t();
    const auto other = run.another(model);
    {
      auto scope = other->no_sync();
      other->loss(0).backward();
    }
    other->loss(1).backward();
    run.note(torch::tensor(other->clip_grad_norm_(1.0), at::kDouble));
    other->optimizer().step();
    run.note_state(*other);
  });
}

// Also where backward reduces before it accumulates.
TEST_P(Wrapping, GradientsFromBeforeWrappingStayThroughReductions) {
  play(GetParam(), {}, [](Trainer& run) {
    const auto other = another_with_gradients(run);
    other->loss(0).backward();
    {
      auto scope = other->no_sync();
      other->loss(1).backward();
    }
    other->loss(2).backward();
    other->optimizer().step();
    run.note_state(*other);
  });
}

TEST_P(Wrapping, GradientsFromBeforeWrappingAreSteppedAlone) {
  play(GetParam(), {}, [](Trainer& run) {
    const auto other = another_with_gradients(run);
    other->optimizer().step();
    run.note_state(*other);
    other->model->zero_grad();
    other->loss(0).backward();
    other->optimizer().step();
    run.note_state(*other);
  });
}

TEST_P(Wrapping, TheWrapperIsMadeAgainBetweenBackwardAndStep) {
  play(GetParam(), {.expect = is_sharded(GetParam()) ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    const Model model = another_mlp();
    auto first = run.another(model);
    first->loss(0).backward();
    first.reset();
    const auto second = run.another(model);
    {
      auto scope = second->no_sync();
      second->loss(1).backward();
    }
    second->loss(2).backward();
    second->optimizer().step();
    run.note_state(*second);
  });
}

TEST_P(Wrapping, ASecondWrapperAroundTheSameModule) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto second = run.another(run.model);
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

struct Parts {
  torch::nn::Linear first = linear(91), second = linear(92);
  static torch::nn::Linear linear(uint64_t seed) {
    return seeded(seed, [] {
      torch::nn::Linear made(kFeatures, kFeatures);
      made->to(at::kDouble);
      return made;
    });
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& part : {first, second})
      for (const auto& parameter : part->parameters()) all.push_back(parameter.detach().clone());
    return all;
  }
};

at::Tensor rows(int step) {
  return torch::randn({kRows, kFeatures}, at::detail::createCPUGenerator(static_cast<uint64_t>(step)), at::kDouble);
}
at::Tensor rows(int step, const Communicator& comm) {
  return rows(step).slice(0, kRows * comm.rank() / comm.size(), kRows * (comm.rank() + 1) / comm.size());
}

std::vector<at::Tensor> trained_alone(int steps) {
  Parts parts;
  std::vector<at::Tensor> all = parts.first->parameters();
  for (const auto& parameter : parts.second->parameters()) all.push_back(parameter);
  torch::optim::SGD optimizer(all, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(parts.second(parts.first(rows(2 * step)).tanh()), rows(2 * step + 1)).backward();
    optimizer.step();
  }
  return parts.values();
}

void expect_close(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::allclose(values[i], expected[i], 1e-7, 1e-9)) << i;
}

// One half is replicated, the other sharded; one backward reaches both.
TEST(WrappingOfPrograms, OneLossThroughTwoWrappers) {
  const auto expected = trained_alone(4);
  for (int world : {2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      Parts parts;
      DistributedDataParallel ddp(parts.first, comm);
      FullyShardedDataParallel fsdp(parts.second, comm);
      auto all = ddp.parameters();
      for (const auto& parameter : fsdp.parameters()) all.push_back(parameter);
      torch::optim::SGD optimizer(all, torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        torch::mse_loss(fsdp(ddp(rows(2 * step, *comm)).tanh()), rows(2 * step + 1, *comm)).backward();
        optimizer.step();
      }
      const ScopeExit scope = fsdp.summon_full_params();
      expect_close(parts.values(), expected);
    });
  }
}

// Trained under one wrapper, then, without it, under another: the first leaves nothing behind that averages twice.
TEST(WrappingOfPrograms, OneWrapperAfterAnother) {
  const auto expected = trained_alone(6);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Parts parts;
    torch::nn::Sequential model(parts.first, torch::nn::Functional(torch::tanh), parts.second);
    std::vector<at::Tensor> momenta(4);
    auto train = [&](auto& wrapper, int begin) {
      for (int step = begin; step < begin + 2; ++step) {
        wrapper.zero_grad();
        torch::mse_loss(wrapper.forward(rows(2 * step, *comm)), rows(2 * step + 1, *comm)).backward();
        const torch::NoGradGuard no_grad;
        auto parameters = wrapper.parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          momenta[i] = momenta[i].defined() ? 0.9 * momenta[i] + parameters[i].grad() : parameters[i].grad().clone();
          parameters[i].sub_(0.1 * momenta[i]);
        }
      }
    };
    {
      DistributedDataParallel ddp(model, comm);
      train(ddp, 0);
    }
    {
      DistributedDataParallel ddp(model, comm, {.find_unused_parameters = true, .gradient_as_bucket_view = false});
      train(ddp, 2);
    }
    model->zero_grad();
    FullyShardedDataParallel fsdp(model, comm);
    auto parameters = fsdp.parameters();
    const auto shards = fsdp.named_shards();
    for (size_t i = 0; i < momenta.size(); ++i)
      momenta[i] = momenta[i].flatten().slice(0, shards[i].held.begin, shards[i].held.end).clone();
    train(fsdp, 4);
    const ScopeExit scope = fsdp.summon_full_params();
    expect_close(parts.values(), expected);
  });
}

// Batch norm over all ranks, in a part that is computed again, and evaluated between the parts of a step.
template <class Norm>
struct WithNorm : torch::nn::Module {
  explicit WithNorm(Norm made) : norm(std::move(made)) {
    register_module("first", parts.first), register_module("norm", norm), register_module("second", parts.second);
    norm->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto part = [this](const at::Tensor& input) { return norm->forward(parts.first(input)).tanh(); };
    return parts.second(checkpointed(part, x));
  }
  void train_with(const std::function<at::Tensor(const at::Tensor&)>& call, torch::optim::Optimizer& optimizer,
                  const std::function<at::Tensor(int)>& batch) {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (int part = 0; part < 2; ++part) {
        const int at = 4 * step + 2 * part;
        torch::mse_loss(call(batch(at).requires_grad_()), batch(at + 1)).backward();
        eval();
        {
          const torch::NoGradGuard no_grad;
          call(batch(99));
        }
        train();
      }
      optimizer.step();
    }
  }
  std::vector<at::Tensor> values() const {
    auto all = parts.values();
    for (const auto& buffer : buffers()) all.push_back(buffer.to(at::kDouble));
    return all;
  }
  Parts parts;
  Norm norm;
};

TEST(WrappingOfPrograms, BatchNormOverRanksInACheckpointedPart) {
  const torch::nn::BatchNormOptions options(kFeatures);
  auto alone = std::make_shared<WithNorm<torch::nn::BatchNorm1d>>(torch::nn::BatchNorm1d(options));
  torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  alone->train_with([&](const at::Tensor& x) { return alone->forward(x); }, optimizer, [](int at) { return rows(at); });
  for (int stage = 0; stage < 4; ++stage) {
    on_ranks(stage == 0 ? 3 : 2, [&](std::shared_ptr<Communicator> comm) {
      auto model = std::make_shared<WithNorm<SyncBatchNorm>>(SyncBatchNorm(options, *comm));
      auto wrapper = zero(model, torch::optim::SGDOptions(0.1).momentum(0.9), comm,
                          {.stage = stage, .fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}});
      model->train_with([&](const at::Tensor& x) { return wrapper(x); }, wrapper.optimizer(),
                        [&](int at) { return rows(at, *comm); });
      auto state = wrapper.full_state_dict();
      for (const auto& entry : alone->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-7, 1e-9)) << stage << entry.key();
      for (const auto& entry : alone->named_buffers())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value(), 1e-7, 1e-9)) << stage << entry.key();
    });
  }
}

// Inputs in a map and an optional one, outputs of a program's own type, in which the wrapper finds no tensors.
struct Opinion {
  at::Tensor mean, hidden;
  std::optional<at::Tensor> nothing;
  int calls = 0;
};
struct OfOpinions : torch::nn::Module {
  OfOpinions() { register_module("first", parts.first), register_module("second", parts.second); }
  Opinion forward(const std::map<std::string, at::Tensor>& inputs, const std::optional<at::Tensor>& scale) {
    const at::Tensor h = parts.first(inputs.at("x")).tanh();
    return {parts.second(scale ? h * *scale : h), h.detach(), std::nullopt, ++calls};
  }
  Parts parts;
  int calls = 0;
};

TEST(WrappingOfPrograms, OutputsOfTheProgramsOwnType) {
  const auto expected = trained_alone(4);
  for (int stage = 0; stage < 4; ++stage) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = std::make_shared<OfOpinions>();
      auto wrapper = zero(model, torch::optim::SGDOptions(0.1).momentum(0.9), comm,
                          {.stage = stage, .fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}});
      for (int step = 0; step < 4; ++step) {
        wrapper.optimizer().zero_grad();
        const std::map<std::string, at::Tensor> inputs{{"x", rows(2 * step, *comm)}};
        const Opinion opinion = wrapper(inputs, std::optional<at::Tensor>());
        EXPECT_EQ(opinion.calls, step + 1);
        torch::mse_loss(opinion.mean, rows(2 * step + 1, *comm)).backward();
        wrapper.step();
      }
      auto state = wrapper.full_state_dict();
      std::vector<at::Tensor> values;
      for (const auto& entry : model->named_parameters()) values.push_back(state[entry.key()]);
      expect_close(values, expected);
    });
  }
}

// Five ranks for two numbers.
TEST(WrappingOfPrograms, MoreRanksThanNumbers) {
  for (int stage = 0; stage < 4; ++stage) {
    on_ranks(5, [&](std::shared_ptr<Communicator> comm) {
      const auto loss_of = [](const at::Tensor& out) { return (out - 1).square().mean(); };
      const Model model = seeded_model<Tiny>(93), alone = seeded_model<Tiny>(93);
      torch::optim::Adam optimizer(alone->parameters(), torch::optim::AdamOptions(1e-2));
      auto wrapper = zero(model, torch::optim::AdamOptions(1e-2), comm, {.stage = stage});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(alone->forward(rows(step))).backward();
        optimizer.step();
        wrapper.optimizer().zero_grad();
        loss_of(wrapper(rows(step))).backward();
        wrapper.step();
      }
      EXPECT_TRUE(torch::allclose(wrapper.full_state_dict()["scale"], alone->parameters()[0].detach(), 1e-7, 1e-9));
    });
  }
}

TEST_P(Wrapping, ALayerIsReplacedAndTheModelSaved) {
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

TEST_P(Wrapping, ABackwardWhoseWrapperHasGone) {
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

// The member is not the registered module: fc3's own weight has no gradient, as in one process.
TEST_P(Wrapping, AMemberThatIsReplacedAndNotRegistered) {
  const auto model = [] {
    Model made = mlp();
    mlp_of(*made).fc3->weight = mlp_of(*made).fc1->weight;
    return made;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = model, .unused = true}, three_steps);
}

struct Lazy : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    if (!late.defined()) late = register_parameter("extra", torch::full({kFeatures}, 0.5, at::kDouble));
    return Mlp::forward(x) * late;
  }
  at::Tensor late;
};

TEST_P(Wrapping, AParameterMadeByTheFirstForward) {
  play(GetParam(), {.expect = Expect::kEither, .model = [] { return seeded_model<Lazy>(27); }}, three_steps);
}

// No wrapper would average the gradients of its parameters.
TEST_P(Wrapping, LayerRegisteredAfterWrapping) {
  play(
      GetParam(),
      {.expect = Expect::kRefused, .says = {"parameter 'extra.weight' was registered after the module was wrapped by"}},
      [](Trainer& run) {
        run.train(0);
        Mlp& net = mlp_of(*run.model);
        net.extra = seeded(9, [] { return torch::nn::Linear(kFeatures, kFeatures); });
        net.extra->to(at::kDouble);
        net.register_module("extra", net.extra);
        run.train(1);
      });
}

TEST_P(Wrapping, TheWrapperIsMadeAgain) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    auto again = run.another(run.model);
    again->train(1);
    run.note_state(*again);
  });
}

}  // namespace
}  // namespace tessera::loops::wrapping_test
