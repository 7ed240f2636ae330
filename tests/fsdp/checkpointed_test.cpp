// Activation checkpointing, alone and under FSDP: the bits of the same computation without it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>

#include <deque>
#include <filesystem>
#include <unordered_map>

#include "tests/support/reference.h"

// Types of a program: with and without tessera_visit_tensors().
namespace program {

struct State {
  at::Tensor hidden;
  std::optional<at::Tensor> memory;
};
template <class Visit>
void tessera_visit_tensors(State& state, Visit&& visit) {
  visit(state.hidden, state.memory);
}
struct Prediction {
  at::Tensor logits;
  std::unordered_map<std::string, State> states;
  int steps = 0;
};
template <class Visit>
void tessera_visit_tensors(Prediction& prediction, Visit&& visit) {
  visit(prediction.logits);
  visit(prediction.states);
}
struct Opaque {
  at::Tensor hidden;
};

}  // namespace program

namespace tessera::checkpointed_test {
using namespace internal;
namespace {

using at::Tensor;
static_assert(kHoldsTensors<Tensor> && kHoldsTensors<const Tensor&> &&
              kHoldsTensors<std::deque<std::optional<Tensor>>>);
static_assert(kHoldsTensors<std::array<Tensor, 3>> && kHoldsTensors<std::pair<int, std::map<int, Tensor>>>);
static_assert(kHoldsTensors<torch::OrderedDict<std::string, std::vector<Tensor>>>);
static_assert(kHoldsTensors<std::tuple<int, std::vector<program::Prediction>>> && kKnowsTensorsOf<program::State>);
static_assert(!kHoldsTensors<program::Opaque> && !kKnowsTensorsOf<program::Opaque> && !kKnowsTensorsOf<Tensor*>);
static_assert(kHoldsTensors<std::tuple<Tensor, program::Opaque>> &&
              !kKnowsTensorsOf<std::tuple<Tensor, program::Opaque>>);
static_assert(kKnowsTensorsOf<std::tuple<Tensor, int, std::string, std::vector<bool>, std::map<std::string, double>>>);
static_assert(kKnowsTensorsOf<std::filesystem::path> && kKnowsTensorsOf<at::ScalarType> && !kHoldsTensors<std::string>);
static_assert(kKnowsTensorsOf<at::TensorList> && !kHoldsTensors<at::TensorList>);  // its tensors cannot be replaced

using namespace testing_support;

constexpr int64_t kWidth = 8;

// Draws from a generator of its own. Ranks are threads and share the default one, which a recomputation sets.
at::Tensor rows(int seed) {
  at::Generator draws = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return on_rank_device(torch::randn({3, kWidth}, draws));
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return x + down(torch::gelu(up(norm(x))));
  }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear up{kWidth, 2 * kWidth}, down{2 * kWidth, kWidth};
  int calls = 0;
};
TORCH_MODULE(Block);

// An embedding, checkpointed blocks, and a head tied to the embedding: the tied weight is used inside and outside.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool is_checkpointed) : is_checkpointed_(is_checkpointed) {
    embedding = register_parameter("embedding", torch::randn({5, kWidth}));
    for (int i = 0; i < 4; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding.index_select(0, tokens);
    for (size_t i = 0; i < blocks->size(); ++i) {
      auto block = blocks->ptr<BlockImpl>(i);
      x = is_checkpointed_ ? checkpointed(block, x) : block->forward(x);
    }
    auto head = [this](const at::Tensor& h) { return torch::matmul(h, embedding.t()); };
    return is_checkpointed_ ? checkpointed(head, x) : head(x);
  }
  at::Tensor embedding;
  torch::nn::ModuleList blocks;

 private:
  const bool is_checkpointed_;
};
TORCH_MODULE(Net);

// Drawn before any rank's backward sets the shared generator.
at::Tensor tokens(int rank) {
  static const std::vector<at::Tensor> table = [] {
    std::vector<at::Tensor> drawn;
    for (int i = 0; i < 8; ++i) drawn.push_back(seeded(40 + i, [&] { return torch::randint(5, {6}); }).cpu());
    return drawn;
  }();
  return on_rank_device(table.at(rank));
}
template <class Model>
at::Tensor loss_of(Model& net, int rank) {
  return torch::cross_entropy_loss(call(net, tokens(rank)), tokens(rank + 1));
}

TEST(Checkpointed, GivesTheSameGradientsAlone) {
  auto net = seeded(1, [] { return Net(true); });
  auto reference = seeded(1, [] { return Net(false); });
  loss_of(net, 0).backward();
  loss_of(reference, 0).backward();
  for (const auto& entry : reference->named_parameters())
    EXPECT_TRUE(same_values(net->named_parameters()[entry.key()].grad(), entry.value().grad())) << entry.key();
  EXPECT_EQ(net->blocks->ptr<BlockImpl>(0)->calls, 2);
  torch::NoGradGuard no_grad;
  net->forward(tokens(0));
  EXPECT_EQ(net->blocks->ptr<BlockImpl>(0)->calls, 3);
}

TEST(Checkpointed, TrainsTiedWeightsUnderFsdp) {
  for (int world : fewer_on_devices<std::vector<int>>({1, 2, 3, 4, 5}, {2})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (const bool reshard : {true, false}) {
        for (const auto& policy : {wrap_modules<BlockImpl>(), wrap_by_size(1), WrapPolicy()}) {
          auto net = seeded(1, [] { return Net(true); });
          auto reference = seeded(1, [] { return Net(true); });
          FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = policy, .reshard_after_forward = reshard});
          torch::optim::Adam sharded(fsdp.parameters(), 1e-2), whole(reference->parameters(), 1e-2);
          for (int step = 0; step < 4; ++step) {
            loss_of(fsdp, comm->rank()).backward();
            reference_backward(reference, world, [&](int rank) { return loss_of(reference, rank); });
            sharded.step();
            whole.step();
            sharded.zero_grad();
            whole.zero_grad();
          }
          auto state = fsdp.full_state_dict();
          for (const auto& entry : reference->named_parameters()) {
            // The two gradients of the tied weight are reduced one by one, not as a sum.
            EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-3, 1e-4))
                << "world " << world << " " << entry.key();
          }
          EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
          EXPECT_EQ(fsdp.memory().bucket_bytes, 0);
          if (testing::Test::HasFailure()) return;
        }
      }
    });
  }
}

// Without tied weights all additions have the order of the unsharded loop.
TEST(Checkpointed, ChainsAreBitEqualUnderFsdpAndReduceAsTheyGo) {
  for (int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {3})) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto build = [](bool is_checkpointed) {
        torch::nn::Sequential blocks;
        for (int i = 0; i < 8; ++i) blocks->push_back(Block());
        return CheckpointedSequential(blocks,
                                      is_checkpointed ? WrapPolicy() : wrap_if([](auto&, auto&) { return false; }));
      };
      auto net = seeded(1, [&] { return build(true); });
      auto reference = seeded(1, [&] { return build(false); });
      auto loss = [](auto& model, int rank) { return call(model, rows(rank)).square().mean(); };
      FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<BlockImpl>()});
      torch::optim::Adam sharded(fsdp.parameters(), 1e-2), whole(reference->parameters(), 1e-2);
      for (int step = 0; step < 3; ++step) {
        loss(fsdp, comm->rank()).backward();
        reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
        sharded.step();
        whole.step();
        sharded.zero_grad();
        whole.zero_grad();
      }
      expect_same_parameters(fsdp, *reference, "world " + std::to_string(world));
      EXPECT_LE(fsdp.memory().peak_bucket_bytes, 3 * fsdp.memory().largest_unit_bytes);
    });
  }
}

TEST(Checkpointed, UnitsAreGatheredAgainWhenComputedAgain) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential layers;
    for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(16, 16).bias(false)));
    CheckpointedSequential net(layers);
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    const int64_t half = 16 * 16 * 4 / 2;
    for (int step = 0; step < 3; ++step) {
      const auto before = comm->traffic().sent_bytes;
      fsdp(torch::ones({1, 16})).sum().backward();
      // All units in forward, all but the last two in backward, and the reductions.
      EXPECT_EQ((comm->traffic().sent_bytes - before) / half, 6 + 4 + 6);
    }
  });
}

TEST(Checkpointed, RandomNumbersAreThoseOfTheFirstTime) {
  std::lock_guard lock(generator_mutex);
  auto run = [](bool is_checkpointed) {
    torch::manual_seed(5);
    auto x = torch::ones({100}).requires_grad_();
    auto noisy = [](const at::Tensor& t) { return torch::dropout(t * torch::rand({100}), 0.5, true); };
    auto y = is_checkpointed ? checkpointed(noisy, x) : noisy(x);
    const at::Tensor later = torch::rand({3});
    y.sum().backward();
    return std::vector<at::Tensor>{y.detach(), later, x.grad(),
                                   torch::rand({3})};  // the last: the generator is as before
  };
  const auto expected = run(false), got = run(true);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
}

TEST(Checkpointed, AutocastIsThatOfTheFirstTime) {
  std::vector<at::ScalarType> seen;
  auto layer = torch::nn::Linear(4, 4);
  auto record = [&](const at::Tensor& x) {
    auto y = layer(x);
    seen.push_back(y.scalar_type());
    return y;
  };
  std::optional<Autocast> autocast(std::in_place, at::kCPU);
  auto y = checkpointed(record, torch::ones({1, 4}));
  autocast.reset();
  y.sum().backward();
  EXPECT_EQ(seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

// A recomputation casts weights again. The casts must not outlive it.
TEST(Checkpointed, TheNextForwardCastsTheWeightsOfItsStep) {
  auto layer = torch::nn::Linear(4, 4);
  const at::Tensor x = torch::ones({1, 4});
  const auto forward = [&] {
    const Autocast autocast(at::kCPU);
    return checkpointed(layer, x);
  };
  forward().sum().backward();
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : layer->parameters()) parameter.zero_();
  }
  EXPECT_TRUE(torch::equal(forward(), torch::zeros({1, 4}, at::kBFloat16)));
}

TEST(Checkpointed, ManyInputsAndOutputs) {
  auto a = torch::ones({2}).requires_grad_(), b = torch::full({2}, 3.0).requires_grad_();
  auto ids = torch::arange(2);
  auto function = [](const std::vector<at::Tensor>& xs, std::optional<at::Tensor> none, at::Tensor index, int times) {
    EXPECT_FALSE(none.has_value());
    return std::tuple{xs[0] * xs[1] * times, index + 1, std::string("text"),
                      std::vector<at::Tensor>{at::Tensor(), xs[1] * 2}};
  };
  auto [product, next, text, list] = checkpointed(function, std::vector{a, b}, std::optional<at::Tensor>(), ids, 5);
  EXPECT_EQ(text, "text");
  EXPECT_FALSE(next.requires_grad());
  EXPECT_FALSE(list[0].defined());
  (product.sum() + list[1].sum()).backward();
  EXPECT_TRUE(torch::equal(a.grad(), torch::full({2}, 15.0)));
  EXPECT_TRUE(torch::equal(b.grad(), torch::full({2}, 7.0)));
}

TEST(Checkpointed, NestsAndListsAndUnusedOutputs) {
  auto x = torch::ones({3}).requires_grad_();
  auto inner = [](const at::Tensor& t) { return std::pair{t * t, t * 7}; };
  auto outer = [&](const at::Tensor& t) { return checkpointed(inner, t * 2).first; };
  checkpointed(outer, x).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 8.0)));

  torch::nn::ModuleList list;
  for (int i = 0; i < 2; ++i) list->push_back(Block());
  checkpointed_chain<BlockImpl>(list, torch::ones({2, kWidth})).sum().backward();
  for (const auto& parameter : list->parameters()) EXPECT_TRUE(parameter.grad().defined());
  list->push_back(torch::nn::ReLU());
  EXPECT_THROW(checkpointed_chain<BlockImpl>(list, torch::ones({2, kWidth})), std::invalid_argument);
}

TEST(Checkpointed, LooksIntoTypesThatTheProgramTeaches) {
  auto compute = [](program::Prediction in) {
    program::Prediction out{.steps = in.steps + 1};
    out.logits = torch::tanh(in.logits * *in.states.at("a").memory);
    out.states["b"].hidden = in.states.at("a").hidden.exp();
    return out;
  };
  auto loss_of = [](const program::Prediction& out) {
    EXPECT_EQ(out.steps, 6);
    EXPECT_FALSE(out.states.at("b").memory.has_value());
    return (out.logits * out.states.at("b").hidden).sum();
  };
  std::vector<std::vector<Tensor>> gradients;
  for (const bool is_checkpointed : {false, true}) {
    std::vector<Tensor> leaves;
    for (const float value : {0.5f, 1.5f, 2.5f}) leaves.push_back(torch::full({3}, value).requires_grad_());
    program::Prediction in{leaves[0] * 1, {}, 5};
    in.states["a"] = {leaves[1] * 1, leaves[2] * 1};
    const auto out = is_checkpointed ? checkpointed(compute, in) : compute(in);
    loss_of(out).backward();
    auto& own = gradients.emplace_back();
    for (const auto& leaf : leaves) own.push_back(leaf.grad());
  }
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(gradients[1][i].defined()) << i;
    EXPECT_TRUE(same_values(gradients[0][i], gradients[1][i])) << i;
  }
}

TEST(Checkpointed, MistakesAreNamed) {
  auto x = torch::ones({3}).requires_grad_();
  expect_contains(error_of<std::invalid_argument>([&] { checkpointed([](at::Tensor t) { return t.relu_(); }, x * 1); }),
                  "tensor 0 of its inputs in place");
  int calls = 0;
  auto fickle = [&](const at::Tensor& t) { return ++calls == 1 ? t * 2 : t.sum(); };
  expect_contains(error_of<std::logic_error>([&] { checkpointed(fickle, x).sum().backward(); }),
                  "output 0 as Float []");
  expect_contains(error_of<std::logic_error>([&] {
                    checkpointed([](const at::Tensor& t) { return t * t; }, x).sum().backward({}, std::nullopt, true);
                  }),
                  "create_graph");
  EXPECT_EQ(
      error_of<std::runtime_error>([&] {
        checkpointed(
            [](const at::Tensor& t) -> at::Tensor { throw std::runtime_error("its own" + std::to_string(t.dim())); },
            x);
      }),
      "its own1");
}

// With mixed precision, hybrid sharding and no_sync.
TEST(Checkpointed, WithMixedPrecisionAndAccumulation) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    std::vector<torch::OrderedDict<std::string, at::Tensor>> results;
    for (const bool is_checkpointed : {false, true}) {
      torch::nn::Sequential blocks;
      seeded(1, [&] {
        for (int i = 0; i < 4; ++i) blocks->push_back(Block());
        return 0;
      });
      on_rank_device(blocks);
      CheckpointedSequential net(blocks, is_checkpointed ? WrapPolicy() : wrap_if([](auto&, auto&) { return false; }));
      FsdpOptions options{.auto_wrap = wrap_modules<BlockImpl>()};
      options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      options.mixed_precision.full_precision = wrap_modules<torch::nn::LayerNormImpl>();
      FullyShardedDataParallel fsdp(net, comm, options);
      torch::optim::SGD sgd(fsdp.parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        auto part = [&](int micro) { return rows(10 * micro + comm->rank()); };
        {
          auto guard = fsdp.no_sync();
          fsdp(part(0)).square().sum().backward();
        }
        fsdp(part(1)).square().sum().backward();
        fsdp(part(2)).square().sum().backward();
        sgd.step();
        sgd.zero_grad();
      }
      results.push_back(fsdp.full_state_dict());
    }
    for (const auto& entry : results[0])
      EXPECT_TRUE(same_values(entry.value(), results[1][entry.key()])) << entry.key();
  });
}

}  // namespace
}  // namespace tessera::checkpointed_test
