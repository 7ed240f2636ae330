// Errors: mistakes of the user, ranks that disagree, peers that die.

#include "tests/support/reference.h"

namespace tessera::faults_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::Sequential chain(int depth, int64_t width) {
  torch::nn::Sequential model;
  for (int i = 0; i < depth; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::Tanh());
  }
  return on_rank_device(model);
}

at::Tensor input(int64_t width = 8) { return on_rank_device(torch::ones({2, width})); }
FsdpOptions per_linear() { return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}; }

// ---- mistakes

TEST(Mistakes, WritingToAShardedParameter) {
  for (int world : {1, 2}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      auto model = chain(2, 8);
      FullyShardedDataParallel fsdp(model, comm, per_linear());
      torch::NoGradGuard no_grad;
      auto weight = model->named_parameters()["2.bias"];
      const std::string error = error_of<std::logic_error>([&] { weight.fill_(1); });
      expect_contains(error, "parameter '2.bias' of unit '2' on rank " + std::to_string(comm->rank()));
      expect_contains(error, "summon_full_params");
      expect_contains(error_of<std::logic_error>([&] { torch::nn::init::ones_(weight); }), "2.bias");
      fsdp(input());  // the wrapper still works
    });
  }
}

TEST(Mistakes, AnOptimizerBuiltBeforeWrapping) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(2, 8);
    torch::optim::SGD sgd(model->parameters(), 0.1);
    torch::optim::Adam adam(model->parameters(), 0.1);
    torch::optim::AdamW adamw(model->parameters(), 0.1);
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    fsdp(input()).sum().backward();
    for (torch::optim::Optimizer* optimizer : std::initializer_list<torch::optim::Optimizer*>{&sgd, &adamw})
      expect_contains(error_of<std::logic_error>([&] { optimizer->step(); }),
                      "fsdp.parameters(), of which optimizers are made after wrapping");
    expect_contains(error_of<std::logic_error>([&] { adam.step(); }), "fsdp.parameters()");
    expect_contains(error_of<std::logic_error>([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0); }),
                    "clip_grad_norm_");
  });
}

// The model is one unit, which needs more memory, and trains.
TEST(Mistakes, APolicyThatNamesNoModuleIsToldOf) {
  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts += warning.msg(); }
    std::string texts;
  };
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    const auto wraps = [&](const FsdpOptions& options) {
      warnings.texts.clear();
      FullyShardedDataParallel fsdp(chain(2, 8), comm, options);
      return warnings.texts;
    };
    const auto linears = wrap_modules<torch::nn::LinearImpl>(), convolutions = wrap_modules<torch::nn::Conv2dImpl>();
    EXPECT_EQ(wraps({}), "");
    EXPECT_EQ(wraps({.auto_wrap = wrap_modules<torch::nn::Module>()}), "") << "a base of all";
    const bool is_told = comm->rank() == 0;
    const auto expect_told = [&](const FsdpOptions& options, const std::string& text) {
      const std::string told = wraps(options);
      EXPECT_EQ(told.find("FullyShardedDataParallel: " + text) == 0, is_told) << told;
    };
    expect_told({.auto_wrap = convolutions}, "auto_wrap names no module, so the model is one unit");
    expect_told({.auto_wrap = linears, .mixed_precision = {.full_precision = convolutions}},
                "mixed_precision.full_precision names no module");
    expect_told({.auto_wrap = linears, .ignored_modules = convolutions}, "ignored_modules names no module");
  });
}

TEST(Mistakes, WrappingTwice) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(2, 8);
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    expect_contains(error_of<std::invalid_argument>([&] { FullyShardedDataParallel again(model, comm); }),
                    "parameter '0.weight' on rank " + std::to_string(comm->rank()) + " is sharded already");
  });
}

TEST(Mistakes, ConvertingParametersAfterWrapping) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(2, 8);
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    {
      torch::NoGradGuard no_grad;
      model->parameters()[0].set_data(on_rank_device(torch::zeros({8, 8})));
    }
    fsdp(input());  // takes the new values
    EXPECT_EQ(fsdp.full_state_dict()["0.weight"].abs().sum().item<float>(), 0);
    {
      torch::NoGradGuard no_grad;
      model->parameters()[0].set_data(on_rank_device(torch::zeros({8, 8}, at::kDouble)));
    }
    expect_contains(error_of<std::logic_error>([&] { fsdp(input()); }), "parameter '0.weight'");
  });
}

TEST(Mistakes, DifferentiatingTwice) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(chain(1, 8), comm);
    at::Tensor loss = fsdp(input()).sum();
    expect_contains(error_of<std::logic_error>([&] { loss.backward({}, std::nullopt, /*create_graph=*/true); }),
                    "create_graph");
    fsdp(input()).sum().backward();  // still works
    EXPECT_TRUE(fsdp.parameters()[0].grad().defined());
  });
}

TEST(Mistakes, OptionsOutOfRange) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto wrap = [&](FsdpOptions options) { FullyShardedDataParallel fsdp(chain(1, 8), comm, options); };
    expect_contains(error_of<std::invalid_argument>([&] { wrap({.prefetch = -1}); }), "prefetch is -1");
    expect_contains(error_of<std::invalid_argument>([&] { wrap({.keep_recent = 0}); }), "keep_recent is 0");
    EXPECT_THROW(wrap_by_size(0), std::invalid_argument);
    EXPECT_THROW(wrap_if(nullptr), std::invalid_argument);
    EXPECT_THROW(FullyShardedDataParallel(chain(1, 8), nullptr), std::invalid_argument);
  });
}

TEST(Mistakes, ReadingAShardedParameterBehindTheDispatcherFindsNothing) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = chain(1, 8);
    FullyShardedDataParallel fsdp(model, comm);
    EXPECT_EQ(model->parameters()[0].storage().nbytes(), 0U);
    EXPECT_EQ(model->parameters()[0].storage().data(), nullptr);
  });
}

// ---- ranks that disagree

TEST(Disagreement, AboutTheModelIsNamedOnEveryRank) {
  std::atomic<int> named = 0;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, comm->rank() == 2 ? 5 : 4));
    on_rank_device(model);
    const std::string error = error_of<std::invalid_argument>([&] { FullyShardedDataParallel fsdp(model, comm); });
    expect_contains(error, "rank 2");
    expect_contains(error, "'1.weight'");
    expect_contains(error, "[5, 4]");
    ++named;
    FullyShardedDataParallel fsdp(chain(1, 4), comm);  // the group still works
  });
  EXPECT_EQ(named, 3);
}

TEST(Disagreement, AboutOptionsAndFrozenParameters) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    expect_contains(error_of<std::invalid_argument>(
                        [&] { FullyShardedDataParallel fsdp(chain(1, 4), comm, {.prefetch = comm->rank()}); }),
                    "prefetch=1");
    expect_contains(error_of<std::invalid_argument>([&] {
                      auto model = chain(1, 4);
                      model->parameters()[1].requires_grad_(comm->rank() == 0);
                      FullyShardedDataParallel fsdp(model, comm);
                    }),
                    "frozen");
    expect_contains(error_of<std::invalid_argument>([&] {
                      FsdpOptions options;
                      if (comm->rank() == 1) options = per_linear();
                      FullyShardedDataParallel fsdp(chain(2, 4), comm, options);
                    }),
                    "unit '0'");
  });
}

struct SkippingImpl : torch::nn::Module {
  SkippingImpl() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(at::Tensor x, int skipped) {
    for (int i = 0; i < 4; ++i)
      if (i != skipped) x = layers[i](x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Skipping);

TEST(Disagreement, ARankThatSkipsALayerIsNamedSoon) {
  const auto began = std::chrono::steady_clock::now();
  const std::string error = error_of<CommError>([] {
    on_ranks(2, [](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(on_rank_device(Skipping()), comm, per_linear());
      fsdp(input(), -1).sum().backward();
      fsdp(input(), comm->rank() == 1 ? 2 : -1).sum().backward();
    });
  });
  expect_contains(error, "diverged");
  expect_contains(error, "unit 'layer");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
}

// ---- peers that fail

// Rank 1 throws in the middle of a step; the operations of the others throw CommError.
void expect_death_reaches(bool in_backward) {
  std::atomic<int> told = 0;
  const std::string error = error_of<std::runtime_error>([&] {
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(chain(6, 8), comm, per_linear());
      fsdp(input()).sum().backward();
      if (comm->rank() == 1 && !in_backward) throw std::runtime_error("rank 1 runs out of luck");
      std::string where = "forward";
      try {
        at::Tensor loss = fsdp(input()).sum();
        where = "backward";
        if (comm->rank() == 1) throw std::runtime_error("rank 1 runs out of luck");
        loss.backward();
      } catch (const CommError& lost) {
        EXPECT_EQ(where, in_backward ? "backward" : "forward");
        expect_contains(lost.what(), "rank 1 failed: rank 1 runs out of luck");
        expect_contains(lost.what(), "of unit '");
        ++told;
        throw;
      }
    });
  });
  EXPECT_EQ(error, "rank 1 runs out of luck");
  EXPECT_EQ(told, 2);
}

TEST(Faults, ADeadPeerReachesForward) { expect_death_reaches(false); }
TEST(Faults, ADeadPeerReachesBackward) { expect_death_reaches(true); }

// A function whose backward throws on demand.
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, bool fail) {
    context->saved_data["fail"] = fail;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    if (context->saved_data["fail"].toBool()) throw std::runtime_error("backward failed");
    return {gradients[0], at::Tensor()};
  }
};

TEST(Faults, ABackwardThatThrowsOnAllRanksLosesNothingElse) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return chain(4, 8); });
    auto reference = seeded(1, [] { return chain(4, 8); });
    FullyShardedDataParallel fsdp(model, comm, per_linear());
    torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(reference->parameters(), 0.1);
    auto run = [](torch::nn::Sequential& net, bool fail) {
      at::Tensor x = input();
      for (int i = 0; i < 8; ++i) {
        if (i == 4) x = Failing::apply(x, fail);
        x = i % 2 == 0 ? net[i]->as<torch::nn::Linear>()->forward(x) : torch::tanh(x);
      }
      return x.square().sum();
    };
    for (int step = 0; step < 3; ++step) {
      EXPECT_NE(error_of<std::exception>([&] { run(model, true).backward(); }), "");
      fsdp.zero_grad();
      run(model, false).backward();
      whole.zero_grad();
      run(reference, false).backward();
      sharded.step();
      whole.step();
    }
    expect_same_parameters(fsdp, *reference, "");
    EXPECT_EQ(fsdp.memory().bucket_bytes, 0);
    EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
  });
}

}  // namespace
}  // namespace tessera::faults_test
