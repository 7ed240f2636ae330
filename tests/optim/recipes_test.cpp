// Tessera's own optimizers: their formulas, and equal results with and without sharding.
#include "optim/state/optimizer_state.h"
#include "tests/optim/given_gradients.h"
#include "tests/support/temporary_folder.h"

namespace tessera::recipes_test {
using namespace internal;
namespace {

using namespace testing_support;

// Reading options must not round whole numbers through a double.
TEST(Options, KeepLargeWholeNumbersWhenTheyAreRead) {
  for (const int64_t number : {std::numeric_limits<int64_t>::max(), (int64_t{1} << 53) + 1}) {
    auto options = AdamW8bitOptions(1e-2).min_8bit_numel(number);
    static_cast<void>(text_of(options));
    EXPECT_EQ(options.min_8bit_numel(), number);
  }
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  auto loaded = AdamW8bitOptions(1e-2);
  write_options(loaded, read_options(AdamW8bitOptions(1e-2).min_8bit_numel(kNever)));
  EXPECT_EQ(loaded.min_8bit_numel(), kNever);
}

template <class Optimizer, class Options>
void expect_checkpoints_go_on(const Options& options, double tolerance) {
  const TemporaryFolder folder;
  const auto expected = stepped<Optimizer>({}, options, 0, 6);
  const Grouping<Options> grouping = &one_group<Options>;
  stepped<Optimizer>({3, 3}, options, 0, 2, grouping, {.save = folder / "a"});
  stepped<Optimizer>({2, 2}, options, 2, 3, grouping, {folder / "a", folder / "b"});
  stepped<Optimizer>({1, 0}, options, 3, 4, grouping, {folder / "b", folder / "c"});
  stepped<Optimizer>({4, 3, 2}, options, 4, 5, grouping, {folder / "c", folder / "d"});
  expect_same(stepped<Optimizer>({5, 3}, options, 5, 6, grouping, {.load = folder / "d"}), expected, tolerance,
              "the chain");
}

// A model that computes: losses of a rank's own part of the batch, accumulated over two micro-batches.
torch::nn::Sequential small_model() {
  return seeded(
      7, [] { return torch::nn::Sequential(torch::nn::Linear(8, 33), torch::nn::GELU(), torch::nn::Linear(33, 8)); });
}

const Grouping<MuonOptions> kWeightsAreMuons = [](const auto& parameters, const MuonOptions& options) {
  std::vector<at::Tensor> matrices, others;
  for (const auto& item : parameters) (item.key().ends_with("weight") ? matrices : others).push_back(item.value());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  groups.emplace_back(others, std::make_unique<MuonOptions>(MuonOptions(options).use_muon(false)));
  return groups;
};

// Trains through zero(), with accumulation: equals one process with the whole batch, to rounding.
template <class Optimizer, class Options>
void expect_trains_everywhere(const Options& options, double tolerance,
                              Grouping<Options> grouping = &one_group<Options>) {
  auto loss_of_part = [](auto& net, int step, int micro, int rank) {
    return call(net, seeded(100 * step + 10 * micro + rank, [] { return torch::randn({16, 8}); })).square().mean();
  };
  for (const Layout& layout :
       fewer_on_devices<std::vector<Layout>>({{1, 3}, {2, 1}, {3, 2}, {4, 3}, {4, 3, 2}}, {{2, 1}, {3, 3}})) {
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      auto reference = small_model();
      Optimizer whole(grouping(reference->named_parameters(), options), options);
      ZeroOptions zero_options{.stage = layout.stage};
      zero_options.groups = [&](const ZeroOptions::Parameters& parameters) { return grouping(parameters, options); };
      zero_options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
      zero_options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
      auto model = zero<Optimizer>(small_model(), options, comm, zero_options);
      for (int step = 0; step < 4; ++step) {
        model.zero_grad();
        whole.zero_grad();
        {
          auto accumulating = model.no_sync();
          loss_of_part(model, step, 0, comm->rank()).backward();
        }
        loss_of_part(model, step, 1, comm->rank()).backward();
        for (int micro = 0; micro < 2; ++micro)
          reference_backward(reference, layout.world,
                             [&](int rank) { return loss_of_part(reference, step, micro, rank); });
        {
          const at::NoGradGuard validation;
          loss_of_part(model, 100, 0, comm->rank());
        }
        model.step();
        whole.step();
      }
      auto state = model.full_state_dict();
      for (const auto& entry : reference->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), tolerance, tolerance))
            << name_of(layout) << " " << entry.key() << " "
            << (state[entry.key()] - entry.value().detach()).abs().max().template item<float>();
    });
  }
}

// ---- Lion ---------------------------------------------------------------------------------------

TEST(Lion, IsTheFormula) {
  auto weight = torch::tensor({3.0, -4.0}, at::kDouble).set_requires_grad(true);
  Lion lion({weight}, LionOptions(0.1).beta1(0.5).beta2(0.75).weight_decay(0.5));
  weight.mutable_grad() = torch::tensor({2.0, -8.0}, at::kDouble);
  lion.step();  // momentum 0.5, -2
  EXPECT_TRUE(torch::allclose(weight.detach(), torch::tensor({3 * 0.95 - 0.1, -4 * 0.95 + 0.1}, at::kDouble)));
  weight.mutable_grad() = torch::tensor({-0.4, 9.0}, at::kDouble);
  lion.step();  // 0.25 - 0.2 > 0, -1 + 4.5 > 0
  EXPECT_TRUE(torch::allclose(weight.detach(), torch::tensor({2.75 * 0.95 - 0.1, -3.7 * 0.95 - 0.1}, at::kDouble)));
}

TEST(Lion, HasTheSameBitsInEveryStageAtEveryWorldSize) {
  const auto options = LionOptions(1e-2).weight_decay(0.1);
  expect_exact_everywhere<Lion>(options, 0);
  expect_exact_everywhere<Lion>(options, 0, Grouping<LionOptions>(&one_group<LionOptions>), at::kBFloat16);
  expect_checkpoints_go_on<Lion>(options, 0);
}

// ---- SGD, fused ---------------------------------------------------------------------------------

TEST(FusedSgd, EqualsTorchs) {
  for (const auto& options :
       {torch::optim::SGDOptions(0.1), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1),
        torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true),
        torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5)})
    expect_same(stepped<SGD>({}, options, 0, 5), stepped<torch::optim::SGD>({}, options, 0, 5), 1e-6, "SGD");
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
  expect_exact_everywhere<SGD>(options, 1e-6);
  expect_checkpoints_go_on<SGD>(options, 1e-6);
}

// ---- Adafactor ----------------------------------------------------------------------------------

// For one matrix or vector, written like torch.optim.Adafactor.
void adafactor_by_hand(at::Tensor& parameter, const at::Tensor& g, at::Tensor& row, at::Tensor& col, int t, double lr) {
  const double eps1 = std::numeric_limits<float>::epsilon(), share = std::pow(t, -0.8);
  at::Tensor average;
  if (g.dim() > 1) {
    const at::Tensor rows = g.square().mean(-1, true), columns = g.square().mean(-2, true);
    row = row.defined() ? row.lerp(rows, share) : rows * share;
    col = col.defined() ? col.lerp(columns, share) : columns * share;
    average = row.matmul(col) / row.mean(-2, true).clamp_min(eps1);
  } else {
    row = row.defined() ? row.lerp(g.square(), share) : g.square() * share;
    average = row;
  }
  const at::Tensor update = average.clamp_min(eps1 * eps1).rsqrt() * g;
  auto size = [](const at::Tensor& x) { return x.norm().item<double>() / std::sqrt(static_cast<double>(x.numel())); };
  const double alpha = std::max(1e-3, size(parameter)) * std::min(lr, 1 / std::sqrt(t));
  parameter = parameter - update * (alpha / std::max(1.0, size(update)));
}

TEST(Adafactor, IsTheFormula) {
  for (const auto& sizes : {std::vector<int64_t>{6, 5}, {7}, {2, 3, 4}}) {
    auto own = seeded(1, [&] { return torch::randn(sizes); }).set_requires_grad(true);
    at::Tensor expected = own.detach().clone(), row, col;
    Adafactor adafactor({own}, AdafactorOptions(0.3));
    for (int t = 1; t <= 5; ++t) {
      const at::Tensor g = seeded(10 + t, [&] { return torch::randn(sizes) * t; });
      own.mutable_grad() = g;
      adafactor.step();
      adafactor_by_hand(expected, g, row, col, t, 0.3);
      EXPECT_TRUE(torch::allclose(own, expected, 1e-5, 1e-6)) << t << own - expected;
    }
  }
}

TEST(Adafactor, IsTheSameInEveryStageAtEveryWorldSize) {
  const auto options = AdafactorOptions(1e-1).weight_decay(0.1);
  expect_exact_everywhere<Adafactor>(options, 1e-6);
  expect_checkpoints_go_on<Adafactor>(options, 1e-6);
  expect_trains_everywhere<Adafactor>(options, 1e-4);
}

// ---- ScheduleFreeAdamW --------------------------------------------------------------------------

// Algorithm 1 of the paper in its own variables: the iterate z, the average x, gradients at y.
TEST(ScheduleFree, IsTheAlgorithm) {
  const double lr = 0.1, beta1 = 0.9, beta2 = 0.99, decay = 0.1;
  auto own = seeded(1, [] { return torch::randn({5, 3}, at::kDouble); }).set_requires_grad(true);
  ScheduleFreeAdamW optimizer({own}, ScheduleFreeOptions(lr).beta2(beta2).weight_decay(decay).warmup_steps(3).r(0.5));
  at::Tensor x = own.detach().clone(), z = x.clone(), y = x.clone(), square = torch::zeros_like(x);
  double weights = 0, lr_max = 0;
  for (int t = 1; t <= 8; ++t) {
    const at::Tensor g = seeded(10 + t, [] { return torch::randn({5, 3}, at::kDouble); });
    own.mutable_grad() = g;
    optimizer.step();
    square = beta2 * square + (1 - beta2) * g * g;
    const double now = lr * std::min(1.0, t / 3.0) * std::sqrt(1 - std::pow(beta2, t));
    lr_max = std::max(lr_max, now);
    const double weight = std::sqrt(t) * lr_max * lr_max;
    weights += weight;
    z = z - now * (g / (square.sqrt() + 1e-8) + decay * y);
    x = (1 - weight / weights) * x + weight / weights * z;
    y = (1 - beta1) * z + beta1 * x;
    EXPECT_TRUE(torch::allclose(own, y, 1e-9, 1e-9)) << t;
    const at::Tensor training = own.detach().clone();
    {
      auto averages = optimizer.swap_in_averages();
      EXPECT_TRUE(torch::allclose(own, x, 1e-9, 1e-9)) << t;
      EXPECT_THROW(optimizer.step(), std::logic_error);
      EXPECT_THROW(static_cast<void>(optimizer.swap_in_averages()), std::logic_error);
    }
    EXPECT_TRUE(torch::equal(own, training));
  }
}

// The weight of a step without a rate would be infinite.
TEST(ScheduleFree, AStepOfRateZeroHasNoWeight) {
  at::Tensor own = torch::ones({3}).set_requires_grad(true);
  ScheduleFreeAdamW optimizer({own}, ScheduleFreeOptions(0).weight_lr_power(-1));
  own.mutable_grad() = torch::ones({3});
  optimizer.step();
  EXPECT_TRUE(torch::equal(own, torch::ones({3})));
  optimizer.param_groups()[0].options().set_lr(0.1);
  optimizer.step();
  EXPECT_TRUE((own < 1).all().item<bool>());
}

// A swap that fails restores the parameters, and the next one succeeds.
// In fp16, an eps of 1e-8 is 0, and a gradient of 0 would be divided by 0. The average of equal iterates is the
// iterate.
TEST(Recipes, GradientsOfZeroChangeNothingInAnyDtype) {
  const auto check = [](const char* name, auto make) {
    for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
      const at::Tensor weight = seeded(1, [&] { return torch::randn({1000}).to(dtype); }).set_requires_grad(true);
      const at::Tensor before = weight.detach().clone();
      const auto optimizer = make(std::vector<at::Tensor>{weight});
      for (int step = 0; step < 20; ++step) {
        weight.mutable_grad() = torch::zeros_like(before);
        optimizer->step();
      }
      EXPECT_TRUE(torch::equal(weight.detach(), before)) << name << " " << dtype;
    }
  };
  using Parameters = std::vector<at::Tensor>;
  const auto adamw = torch::optim::AdamWOptions(0.1).weight_decay(0);
  check("AdamW", [&](const Parameters& all) { return std::make_unique<AdamW>(all, adamw); });
  check("HostAdamW", [&](const Parameters& all) { return std::make_unique<HostAdamW>(all, adamw); });
  check("Lamb", [&](const Parameters& all) { return std::make_unique<Lamb>(all, adamw); });
  check("Lion", [](const Parameters& all) { return std::make_unique<Lion>(all); });
  check("Adafactor", [](const Parameters& all) { return std::make_unique<Adafactor>(all); });
  check("AdamW8bit", [](const Parameters& all) {
    return std::make_unique<AdamW8bit>(all, AdamW8bitOptions(0.1).weight_decay(0).min_8bit_numel(1));
  });
  check("ScheduleFreeAdamW", [](const Parameters& all) { return std::make_unique<ScheduleFreeAdamW>(all); });
}

TEST(ScheduleFree, ASwapThatFailsChangesNothing) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 2; ++i) parameters.push_back(torch::ones({3}).set_requires_grad(true));
  ScheduleFreeAdamW optimizer(parameters, ScheduleFreeOptions(0.1));
  for (at::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones({3});
  for (int step = 0; step < 2; ++step) optimizer.step();
  const at::Tensor training = parameters[0].detach().clone();
  auto& state = static_cast<ScheduleFreeParamState&>(*optimizer.state().at(parameters[1].unsafeGetTensorImpl()));
  const at::Tensor z = std::exchange(state.z(), torch::ones({5}));  // of another shape: lerp_() throws
  EXPECT_THROW(static_cast<void>(optimizer.swap_in_averages()), c10::Error);
  EXPECT_TRUE(torch::equal(parameters[0], training));
  state.z(z);
  auto averages = optimizer.swap_in_averages();
  EXPECT_FALSE(torch::equal(parameters[0], training));
}

TEST(ScheduleFree, HasTheSameBitsInEveryStageAtEveryWorldSize) {
  const auto options = ScheduleFreeOptions(1e-2).weight_decay(0.1).warmup_steps(2);
  expect_exact_everywhere<ScheduleFreeAdamW>(options, 0);
  expect_checkpoints_go_on<ScheduleFreeAdamW>(options, 0);
}

TEST(ScheduleFree, AveragesAreSwappedInUnderEveryStage) {
  const auto options = ScheduleFreeOptions(1e-2);
  for (const Layout& layout : {Layout{2, 0}, Layout{3, 1}, Layout{2, 2}, Layout{3, 3}}) {
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      auto reference = seeded(5, [] { return Bare(); });
      ScheduleFreeAdamW whole(reference->parameters(), options);
      auto model = zero(seeded(5, [] { return Bare(); }), options, comm, {.stage = layout.stage});
      const std::vector<NamedShard> all = whole_shards(*reference);
      for (int step = 0; step < 3; ++step) {
        give_gradients(model.named_shards(), step);
        give_gradients(all, step);
        model.step();
        whole.step();
      }
      const auto before = model.full_state_dict();
      {
        auto averages = dynamic_cast<Averages&>(model.optimizer()).swap_in_averages();
        auto expected = whole.swap_in_averages();
        auto state = model.full_state_dict();
        for (const auto& item : reference->named_parameters())
          EXPECT_TRUE(torch::equal(state[item.key()], item.value())) << name_of(layout) << item.key();
      }
      auto after = model.full_state_dict();
      for (const auto& item : before) EXPECT_TRUE(torch::equal(after[item.key()], item.value()));
    });
  }
  // Averages and optimizer state belong to different points.
  const TemporaryFolder folder;
  for (const int stage : {1, 3})
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = zero(seeded(5, [] { return Bare(); }), options, comm, {.stage = stage});
      give_gradients(model.named_shards(), 0);
      model.step();
      save_checkpoint(folder / "own", model, model.optimizer());
      {
        auto averages = dynamic_cast<Averages&>(model.optimizer()).swap_in_averages();
        const TrainingState state{model, model.optimizer()};
        auto refused = [](auto act) {
          expect_contains(error_of<std::invalid_argument>([&] { act(); }), "the averages, of swap_in_averages()");
        };
        refused([&] { save_checkpoint(folder / "wrong", model, model.optimizer()); });
        refused([&] { save_checkpoint_async(folder / "wrong", state).wait(); });
        refused([&] { load_checkpoint(folder / "own", state); });
        EXPECT_FALSE(std::filesystem::exists(folder / "wrong"));
        save_checkpoint(folder / "averages", model);  // to sample from
      }
      load_checkpoint(folder / "own", model, model.optimizer());
    });
  // A step is refused while averages are swapped in, also through OSS.
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    for (const bool on_host : {false, true}) {
      at::Tensor weight = torch::ones({3}).set_requires_grad(true);
      OSS<ScheduleFreeAdamW> sharded({weight}, options, comm, {.offload = {.params = on_host}});
      weight.mutable_grad() = torch::ones({3});
      sharded.step();
      const at::Tensor before = weight.detach().clone();
      {
        auto averages = sharded.swap_in_averages();
        expect_contains(error_of<std::logic_error>([&] { sharded.step(); }), "while the averages are swapped in");
      }
      EXPECT_TRUE(torch::equal(weight, before));
    }
  });
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    OSS<SGD> sgd({torch::ones({3}).set_requires_grad(true)}, torch::optim::SGDOptions(0.1), comm);
    EXPECT_THROW(static_cast<void>(sgd.swap_in_averages()), std::logic_error);
  });
}

// One unit has one element, so other ranks hold nothing of it. Another unit is frozen, and so not averaged.
TEST(ScheduleFree, AveragesOfAUnitOfWhichARankHasNothing) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("wide", wide);
      register_module("small", small);
      register_module("frozen", frozen);
      frozen->weight.set_requires_grad(false);
    }
    at::Tensor forward(const at::Tensor& x) { return frozen(small(wide(x).tanh())); }
    torch::nn::Linear wide{8, 1};
    torch::nn::Linear small{torch::nn::LinearOptions(1, 1).bias(false)};
    torch::nn::Linear frozen{torch::nn::LinearOptions(1, 1).bias(false)};
  };
  auto made = [] { return seeded(3, [] { return std::make_shared<Net>(); }); };
  auto rows = [](int step, int rank) { return seeded(10 * step + rank, [] { return torch::randn({4, 8}); }); };
  const auto options = ScheduleFreeOptions(5e-2);
  for (const int world : {1, 3, 4})
    for (const bool reshards : {true, false})
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto reference = made();
        ScheduleFreeAdamW whole(reference->parameters(), options);
        FullyShardedDataParallel fsdp(
            made(), comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .reshard_after_forward = reshards});
        ScheduleFreeAdamW optimizer(fsdp.parameters(), options);
        auto validate = [&] {
          const at::NoGradGuard no_grad;
          const at::Tensor own = fsdp(rows(99, 0)), expected = reference->forward(rows(99, 0));
          EXPECT_TRUE(torch::allclose(own, expected, 1e-4, 1e-5)) << world << reshards;
        };
        for (int step = 0; step < 4; ++step) {
          step_both(optimizer, whole, [&] {
            fsdp(rows(step, comm->rank())).square().mean().backward();
            reference_backward(reference, world,
                               [&](int rank) { return reference->forward(rows(step, rank)).square().mean(); });
          });
          validate();
          {
            auto averages = optimizer.swap_in_averages();
            auto expected = whole.swap_in_averages();
            validate();
          }
          validate();
        }
      });
}

// ---- AdamW in 8 bit -----------------------------------------------------------------------------

TEST(AdamW8bit, MapIsBitsandbytes) {
  for (const bool is_signed : {true, false}) {
    const at::Tensor map = dynamic_map(is_signed);
    ASSERT_EQ(map.numel(), 256);
    EXPECT_TRUE((map.narrow(0, 1, 255) > map.narrow(0, 0, 255)).all().item<bool>());
    EXPECT_EQ(map[255].item<float>(), 1.0F);
    EXPECT_EQ((map == 0).sum().item<int64_t>(), 1);
  }
  // From create_dynamic_map(): the largest fractions of 64 (128 without a sign), the smallest numbers.
  EXPECT_FLOAT_EQ(dynamic_map(true)[254].item<float>(), 0.99296875F);
  EXPECT_FLOAT_EQ(dynamic_map(true)[0].item<float>(), -0.99296875F);
  EXPECT_FLOAT_EQ(dynamic_map(true)[128].item<float>(), 5.5e-7F);
  EXPECT_FLOAT_EQ(dynamic_map(false)[254].item<float>(), 0.996484375F);
  EXPECT_FLOAT_EQ(dynamic_map(false)[1].item<float>(), 3.25e-7F);
}

TEST(AdamW8bit, HasTheSameBitsInEveryStageAtEveryWorldSize) {
  for (const bool decoupled : {true, false}) {
    const auto options = AdamW8bitOptions(1e-2).min_8bit_numel(decoupled ? 0 : 600).decoupled(decoupled);
    expect_exact_everywhere<AdamW8bit>(options, 0);
    expect_checkpoints_go_on<AdamW8bit>(options, 0);
  }
  expect_exact_everywhere<AdamW8bit>(AdamW8bitOptions(1e-2).min_8bit_numel(0), 0,
                                     Grouping<AdamW8bitOptions>(&one_group<AdamW8bitOptions>), at::kBFloat16);
}

// Equal to Adam in fp32, close to it in 8 bit.
TEST(AdamW8bit, IsAdamWToTheRoundingOfItsStates) {
  const auto adamw = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  const auto expected = stepped<torch::optim::AdamW>({}, adamw, 0, 5);
  const auto options = AdamW8bitOptions(1e-2).weight_decay(0.1);
  expect_same(stepped<AdamW8bit>({}, options, 0, 5), expected, 1e-6, "fp32");
  expect_same(stepped<AdamW8bit>({}, AdamW8bitOptions(options).min_8bit_numel(0), 0, 2),
              stepped<torch::optim::AdamW>({}, adamw, 0, 2), 1e-2, "8 bit");
  const auto adam = torch::optim::AdamOptions(1e-2).weight_decay(0.1);
  expect_same(stepped<AdamW8bit>({}, AdamW8bitOptions(options).decoupled(false), 0, 5),
              stepped<torch::optim::Adam>({}, adam, 0, 5), 1e-6, "Adam");
}

// State takes 2 bytes a parameter and 8 a block, of a rank's part. A step adds one all-reduce of two floats for each
// cut to that of the flags of gradients.
TEST(AdamW8bit, TakesAQuarterOfTheBytes) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(torch::nn::Linear(torch::nn::LinearOptions(100, 90).bias(false)), comm);
      AdamW8bit optimizer(fsdp);
      at::Tensor leaf = fsdp.parameters()[0];
      leaf.mutable_grad() = torch::ones_like(leaf).detach();
      const auto before = comm->traffic();
      optimizer.step();
      EXPECT_EQ(comm->traffic().collectives - before.collectives, world > 1 ? 2 : 0);
      int64_t bytes = 0;
      for (const auto& [key, state] : optimizer.state())
        for (const auto& [name, tensor] : read_state(*state).tensors) bytes += static_cast<int64_t>(tensor.nbytes());
      const int64_t numel = leaf.numel();
      EXPECT_GE(bytes, 2 * numel + 8 * (numel / 256));
      EXPECT_LE(bytes, 2 * numel + 8 * (numel / 256 + 2));
    });
  }
}

// If min_8bit_numel changes later, existing states keep their format, on all ranks.
TEST(AdamW8bit, KeepsStatesOfTheKindThatTheyAre) {
  const TemporaryFolder folder;
  for (const int64_t first : {0, 1 << 20}) {
    const auto before = AdamW8bitOptions(1e-2).min_8bit_numel(first);
    const auto after = AdamW8bitOptions(1e-2).min_8bit_numel((1 << 20) - first);
    const auto expected = stepped<AdamW8bit>({}, before, 0, 4);
    const Grouping<AdamW8bitOptions> grouping = &one_group<AdamW8bitOptions>;
    stepped<AdamW8bit>({2, 3}, before, 0, 3, grouping, {.save = folder / "a"});
    on_ranks(5, [&](std::shared_ptr<Communicator> comm) {
      auto model = zero(seeded(5, [] { return Bare(); }), after, comm, {.stage = 3});
      load_checkpoint(folder / "a", model, model.optimizer());
      static_cast<AdamW8bitOptions&>(model.optimizer().param_groups()[0].options())
          .min_8bit_numel(after.min_8bit_numel());
      give_gradients(model.named_shards(), 3);
      model.step();
      std::map<std::string, at::Tensor> got;
      for (const auto& item : model.full_state_dict()) got[item.key()] = item.value();
      expect_same(got, expected, 0, "states from elsewhere");
    });
  }
}

// A NaN or infinite gradient invalidates its block, including other ranks' elements.
TEST(AdamW8bit, ABlockWithoutNumbersIsOneAtEveryWorldSize) {
  const auto options = AdamW8bitOptions(1e-2).min_8bit_numel(0);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    std::map<std::string, at::Tensor> expected;
    for (const int world : {1, 2, 3, 5}) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = zero(seeded(5, [] { return Bare(); }), options, comm, {.stage = 3});
        for (int step = 0; step < 3; ++step) {
          give_gradients(model.named_shards(), step);
          for (const NamedShard& shard : model.named_shards())
            if (step == 1 && shard.tensor.grad().defined())
              for (int64_t i = 5; i < shard.held.end; i += 401)
                if (i >= shard.held.begin) shard.tensor.grad().view({-1})[i - shard.held.begin].fill_(bad);
          model.step();
        }
        std::map<std::string, at::Tensor> got;
        for (const auto& item : model.full_state_dict()) got[item.key()] = item.value();
        if (world == 1) return static_cast<void>(expected = got);
        for (const auto& [name, value] : expected)
          EXPECT_TRUE(torch::allclose(got.at(name), value, 0, 0, /*equal_nan=*/true)) << world << name;
      });
    }
    EXPECT_TRUE(expected.at("b.large").isnan().any().item<bool>());
    EXPECT_FALSE(expected.at("b.large").isnan().all().item<bool>());
  }
}

TEST(AdamW8bit, TrainsNearlyAsWellAsFp32) {
  at::set_num_threads(1);
  auto final_loss = [](auto optimizer_for) {
    auto model = small_model();
    auto optimizer = optimizer_for(model->parameters());
    double loss = 0;
    for (int step = 0; step < 150; ++step) {
      optimizer.zero_grad();
      const at::Tensor x = seeded(step, [] { return torch::randn({64, 8}); });
      const at::Tensor value = (model->forward(x) - x.flip(1).tanh()).square().mean();
      value.backward();
      optimizer.step();
      if (step >= 140) loss += value.template item<double>() / 10;
    }
    return loss;
  };
  const double fp32 = final_loss([](auto parameters) { return AdamW(parameters, torch::optim::AdamWOptions(5e-3)); });
  const double eight =
      final_loss([](auto parameters) { return AdamW8bit(parameters, AdamW8bitOptions(5e-3).min_8bit_numel(0)); });
  EXPECT_LT(fp32, 0.1);
  EXPECT_NEAR(eight, fp32, 0.05 * fp32);
}

// ---- all ----------------------------------------------------------------------------------------

// Owners' values are bit-exact; other ranks hold rounded ones.
template <class Optimizer, class Options>
void expect_copies_are_rounded(const Options& options, double tolerance) {
  const auto expected = stepped<Optimizer>({}, options, 0, 3);
  for (const Layout& layout : {Layout{3, 1}, Layout{2, 2}, Layout{2, 1, 0, true}}) {
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      ZeroOptions zero_options{.stage = layout.stage};
      zero_options.oss = {.broadcast_dtype = at::kBFloat16, .offload = {.params = layout.offload}};
      auto model = zero<Optimizer>(seeded(5, [] { return Bare(); }), options, comm, zero_options);
      for (int step = 0; step < 3; ++step) {
        give_gradients(model.named_shards(), step);
        model.step();
      }
      const auto& sharded = dynamic_cast<ShardedOptimizer&>(model.optimizer());
      std::map<std::string, at::Tensor> own, values;
      for (const auto& item : model.module()->named_parameters()) {
        const at::Tensor& whole = expected.at(item.key());
        own[item.key()] = item.value().detach();
        values[item.key()] = sharded.owns(item.value()) ? whole : whole.to(at::kBFloat16).to(at::kFloat);
      }
      // A rounding difference may select the other bf16 neighbour.
      expect_same(own, values, tolerance == 0 ? 0 : 1e-2, name_of(layout));
      for (const auto& item : model.module()->named_parameters()) {
        if (!sharded.owns(item.value())) continue;
        EXPECT_TRUE(torch::allclose(item.value(), expected.at(item.key()), tolerance, tolerance)) << item.key();
      }
    });
  }
}

TEST(Recipes, OwnersKeepWhatOthersHaveRounded) {
  expect_copies_are_rounded<Lion>(LionOptions(1e-2).weight_decay(0.1), 0);
  expect_copies_are_rounded<AdamW8bit>(AdamW8bitOptions(1e-2).min_8bit_numel(600), 0);
  expect_copies_are_rounded<ScheduleFreeAdamW>(ScheduleFreeOptions(1e-2), 0);
  expect_copies_are_rounded<Lamb>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1), 1e-6);
  expect_copies_are_rounded<Adafactor>(AdafactorOptions(1e-2), 1e-6);
}

// Gradients are sent to owners in 16 bit, and added in fp32.
TEST(Recipes, GradientsTravelRounded) {
  auto loss_of_part = [](auto& net, int step, int rank) {
    return call(net, seeded(10 * step + rank, [] { return torch::randn({16, 8}); })).square().mean();
  };
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    auto reference = small_model();
    SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto model = zero<SGD>(small_model(), torch::optim::SGDOptions(0.1).momentum(0.9), comm,
                           {.stage = 2, .sdp = {.reduce_dtype = at::kBFloat16}});
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      loss_of_part(model, step, comm->rank()).backward();
      // The sum is rounded once more, to be sent.
      std::vector<at::Tensor> sums;
      for (int rank = 0; rank < 3; ++rank) {
        reference->zero_grad();
        loss_of_part(reference, step, rank).backward();
        for (size_t i = 0; i < reference->parameters().size(); ++i) {
          const at::Tensor gradient = reference->parameters()[i].grad().to(at::kBFloat16).to(at::kFloat);
          rank == 0 ? sums.push_back(gradient) : static_cast<void>(sums[i] = sums[i] + gradient);
        }
      }
      for (size_t i = 0; i < sums.size(); ++i) reference->parameters()[i].mutable_grad() = sums[i] / 3;
      model.step();
      whole.step();
    }
    auto state = model.full_state_dict();
    for (const auto& entry : reference->named_parameters())
      EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 2e-3, 2e-4))
          << entry.key() << (state[entry.key()] - entry.value().detach()).abs().max().item<float>();
  });
}

TEST(Recipes, TrainWithAccumulationInEveryStage) {
  expect_trains_everywhere<AdamW8bit>(AdamW8bitOptions(1e-3), 1e-4);
  expect_trains_everywhere<Lamb>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1), 1e-4);
  expect_trains_everywhere<Lion>(LionOptions(1e-4), 1e-3);
  expect_trains_everywhere<SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), 1e-5);
  expect_trains_everywhere<ScheduleFreeAdamW>(ScheduleFreeOptions(1e-3), 1e-4);
  expect_trains_everywhere<Muon>(MuonOptions(1e-2).bfloat16(false), 1e-4, kWeightsAreMuons);
}

// Ranks and micro-batches with different numbers of tokens: equals the gradient of the mean over all tokens in one
// process.
TEST(Recipes, GradientsAreDividedByTheTokensOfAllRanks) {
  auto rows = [](int rank, int micro) { return 1 + 3 * rank + 5 * micro; };
  auto sum_of_losses = [&](auto& net, int rank, int micro) {
    const at::Tensor x = seeded(10 * rank + micro, [&] { return torch::randn({rows(rank, micro), 8}); });
    return call(net, x).square().sum();
  };
  for (const Layout& layout : {Layout{2, 0}, Layout{3, 1}, Layout{3, 2}, Layout{4, 3}, Layout{4, 3, 2}, Layout{1, 3},
                               Layout{2, 3, 0, true}, Layout{5, 3}, Layout{5, 2}, Layout{1, 0}}) {
    const bool in_8_bit = layout.world == 5;
    auto reference = small_model();
    int64_t tokens = 0;
    for (int rank = 0; rank < layout.world; ++rank)
      for (int micro = 0; micro < 2; ++micro) {
        sum_of_losses(reference, rank, micro).backward();
        tokens += rows(rank, micro);
      }
    torch::optim::SGD whole(reference->parameters(), 1.0);
    for (const at::Tensor& parameter : reference->parameters()) parameter.grad().div_(static_cast<double>(tokens));
    whole.step();
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      ZeroOptions options{.stage = layout.stage};
      options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
      options.fsdp.offload = {.params = layout.offload, .grads = layout.offload};
      if (in_8_bit) options.sdp.wire = options.fsdp.wire.gradients = WireFormat::kInt8Blocks;
      auto model = zero(small_model(), torch::optim::SGDOptions(1.0), comm, options);
      EXPECT_EQ(model.divide_gradients_by_sum(rows(comm->rank(), 0) + rows(comm->rank(), 1)), tokens);
      {
        auto accumulating = model.no_sync();
        sum_of_losses(model, comm->rank(), 0).backward();
      }
      sum_of_losses(model, comm->rank(), 1).backward();
      model.step();
      auto state = model.full_state_dict();
      for (const auto& entry : reference->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-5, in_8_bit ? 5e-3 : 1e-6))
            << name_of(layout) << entry.key()
            << (state[entry.key()] - entry.value().detach()).abs().max().template item<float>();
      EXPECT_NE(error_of<std::invalid_argument>([&] { model.divide_gradients_by_sum(0); }), "");
      expect_contains(
          error_of<std::invalid_argument>([&] { model.divide_gradients_by_sum(comm->rank() == 0 ? -1 : 5); }),
          "expected 0 or more on each");
    });
  }
}

// bf16 compute with fp32 masters, reduced gradients and states. The reference in one process rounds masters for each
// forward and adds bf16 gradients in fp32.
template <class Optimizer, class Options>
void expect_trains_in_mixed_precision(const Options& options, double tolerance, int world,
                                      Grouping<Options> grouping = &one_group<Options>) {
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    ZeroOptions zero_options{.stage = 3};
    zero_options.groups = [&](const ZeroOptions::Parameters& parameters) { return grouping(parameters, options); };
    zero_options.fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                         .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    auto model = zero<Optimizer>(small_model(), options, comm, zero_options);
    auto masters = small_model(), rounded = small_model();
    rounded->to(at::kBFloat16);
    Optimizer whole(grouping(masters->named_parameters(), options), options);
    auto loss_of_part = [](auto& net, const at::Tensor& x) {
      return (call(net, x).to(at::kFloat) - x.flip(1).to(at::kFloat)).square().mean();
    };
    for (int step = 0; step < 4; ++step) {
      auto part = [&](int rank) { return seeded(10 * step + rank, [] { return torch::randn({32, 8}); }); };
      model.zero_grad();
      loss_of_part(model, part(comm->rank())).backward();
      model.step();
      const auto own = masters->parameters(), copies = rounded->parameters();
      for (size_t i = 0; i < own.size(); ++i) {
        at::NoGradGuard no_grad;
        copies[i].copy_(own[i]);
        const_cast<at::Tensor&>(own[i]).mutable_grad() = torch::zeros_like(own[i]).detach();
      }
      for (int rank = 0; rank < world; ++rank) {
        rounded->zero_grad();
        const at::Tensor x = part(rank);
        (rounded->forward(x.to(at::kBFloat16)).to(at::kFloat) - x.flip(1)).square().mean().backward();
        for (size_t i = 0; i < own.size(); ++i) own[i].grad().add_(copies[i].grad().to(at::kFloat), 1.0 / world);
      }
      whole.step();
    }
    auto state = model.full_state_dict();
    for (const auto& entry : masters->named_parameters()) {
      EXPECT_EQ(state[entry.key()].scalar_type(), at::kFloat);
      EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), tolerance, tolerance))
          << entry.key() << " " << (state[entry.key()] - entry.value().detach()).abs().max().template item<float>();
    }
  });
}

TEST(Recipes, TrainInMixedPrecision) {
  expect_trains_in_mixed_precision<Lion>(LionOptions(1e-4), 1e-5, 2);
  expect_trains_in_mixed_precision<Adafactor>(AdafactorOptions(3e-2), 1e-5, 3);
  expect_trains_in_mixed_precision<ScheduleFreeAdamW>(ScheduleFreeOptions(1e-3), 1e-5, 1);
  expect_trains_in_mixed_precision<AdamW8bit>(AdamW8bitOptions(1e-3).min_8bit_numel(0), 1e-4, 2);
  expect_trains_in_mixed_precision<SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), 1e-5, 3);
  expect_trains_in_mixed_precision<Lamb>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1), 1e-5, 2);
  expect_trains_in_mixed_precision<Muon>(MuonOptions(1e-2).bfloat16(false), 1e-4, 3, kWeightsAreMuons);
}

TEST(Recipes, ArchivesComeBack) {
  auto own = seeded(1, [] { return torch::randn({40, 40}); }).set_requires_grad(true);
  own.mutable_grad() = torch::ones({40, 40});
  AdamW8bit first({own}, AdamW8bitOptions(1e-2).min_8bit_numel(0));
  first.step();
  std::stringstream file;
  torch::save(first, file);
  AdamW8bit second({own}, AdamW8bitOptions(0.5));
  torch::load(second, file);
  const auto& state = static_cast<AdamW8bitParamState&>(*second.state().at(own.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 1);
  EXPECT_TRUE(torch::allclose(state.exp_avg_scale(), torch::full({7}, 0.1)));
  EXPECT_EQ(static_cast<AdamW8bitOptions&>(second.param_groups()[0].options()).min_8bit_numel(), 0);
  // Refuses another optimizer's archive, even if its fields are a subset.
  auto refused = [&](auto& optimizer, std::stringstream& archive) {
    expect_contains(error_of<std::invalid_argument>([&] { torch::load(optimizer, archive); }),
                    "an archive of another optimizer");
  };
  Lion lion({own}), again({own});
  lion.step();
  Muon muon({own});
  muon.step();
  std::stringstream of_lion, of_muon, of_eight;
  torch::save(lion, of_lion), torch::save(muon, of_muon), torch::save(first, of_eight);
  refused(muon, of_lion);
  refused(lion, of_muon);
  refused(lion, of_eight);
  of_lion.seekg(0);
  torch::load(again, of_lion);
  EXPECT_TRUE(torch::equal(static_cast<LionParamState&>(*again.state().at(own.unsafeGetTensorImpl())).exp_avg(),
                           static_cast<LionParamState&>(*lion.state().at(own.unsafeGetTensorImpl())).exp_avg()));
}

// A program changes the optimizer during training: learning rates by a scheduler, decay of weights only, another beta
// from the third step on, and groups added later through the base class that zero() returns.
template <class Optimizer, class Options>
void expect_follows_its_program(const Options& options, double tolerance) {
  constexpr int kSteps = 5;
  auto is_late = [](const std::string& name) { return name.starts_with("b."); };
  auto group_of = [&](const ZeroOptions::Parameters& parameters, bool late, bool weights) {
    std::vector<at::Tensor> chosen;
    for (const auto& item : parameters)
      if (is_late(item.key()) == late &&
          (item.key() == "a.bias" || item.key() == "a.scalar" || item.key() == "b.one") != weights)
        chosen.push_back(item.value());
    auto own = std::make_unique<Options>(options);
    write_options(*own, {{"weight_decay", weights ? 0.1 : 0.0}});
    static_cast<torch::optim::OptimizerOptions&>(*own).set_lr(options.lr() * (weights ? 1 : 0.5));
    return torch::optim::OptimizerParamGroup(chosen, std::move(own));
  };
  auto run = [&](torch::optim::Optimizer& optimizer, const ZeroOptions::Parameters& parameters, auto step) {
    for (int i = 0; i < kSteps; ++i) {
      if (i == 2) {
        optimizer.add_param_group(group_of(parameters, true, true));
        optimizer.add_param_group(group_of(parameters, true, false));
        for (auto& group : optimizer.param_groups()) write_options(group.options(), {{"beta2", 0.9}});
      }
      for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * 0.8);
      step(i);
    }
  };
  auto net = seeded(5, [] { return Bare(); });
  const std::vector<NamedShard> whole = whole_shards(*net);
  const auto parameters = net->named_parameters();
  Optimizer unsharded({group_of(parameters, false, true), group_of(parameters, false, false)}, options);
  run(unsharded, parameters, [&](int step) { give_gradients(whole, step), unsharded.step(); });
  std::map<std::string, at::Tensor> expected;
  for (const auto& item : parameters) expected[item.key()] = item.value().detach();
  for (const Layout& layout : {Layout{3, 3}, Layout{4, 3, 2}, Layout{2, 0}, Layout{5, 1}, Layout{2, 3, 0, true}}) {
    std::map<std::string, at::Tensor> got;
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      ZeroOptions zero_options{.stage = layout.stage};
      zero_options.groups = [&](const ZeroOptions::Parameters& named) {
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.push_back(group_of(named, false, true)), groups.push_back(group_of(named, false, false));
        return groups;
      };
      zero_options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
      zero_options.fsdp.offload = {.params = layout.offload, .grads = layout.offload};
      auto model = zero<Optimizer>(seeded(5, [] { return Bare(); }), options, comm, zero_options);
      run(model.optimizer(), model.named_parameters(), [&](int step) {
        give_gradients(model.named_shards(), step);
        model.step();
      });
      auto state = model.full_state_dict();
      if (comm->rank() == 0)
        for (const auto& item : state) got[item.key()] = item.value();
    });
    expect_same(got, expected, tolerance, name_of(layout));
  }
}

TEST(Recipes, FollowWhatAProgramSetsAndAdds) {
  expect_follows_its_program<AdamW8bit>(AdamW8bitOptions(1e-2).min_8bit_numel(600), 0);
  expect_follows_its_program<Lion>(LionOptions(1e-2), 0);
  expect_follows_its_program<ScheduleFreeAdamW>(ScheduleFreeOptions(1e-2), 0);
  expect_follows_its_program<Muon>(MuonOptions::adamw(1e-2), 1e-6);
  expect_follows_its_program<AdamW>(torch::optim::AdamWOptions(1e-2), 1e-6);
  expect_follows_its_program<Lamb>(torch::optim::AdamWOptions(1e-2), 1e-6);
}

// Groups added later must meet the checks of construction, or nothing changes.
TEST(Recipes, GroupsThatComeLaterAreLookedAt) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    const at::Tensor weight = fsdp.parameters()[0];
    auto refused = [&](auto act, const std::string& expected) {
      expect_contains(error_of<std::invalid_argument>([&] { act(); }), expected);
    };
    auto expect_looked_at = [&](auto& optimizer, auto options) {
      torch::optim::Optimizer& base = optimizer;
      const torch::optim::OptimizerParamGroup foreign({torch::ones({3}).set_requires_grad(true)}),
          of_others({fsdp.parameters()[1]}, std::make_unique<torch::optim::RMSpropOptions>(1e-3)),
          of_bias({fsdp.parameters()[1]}, std::make_unique<decltype(options)>(options));
      refused([&] { optimizer.add_param_group(foreign); }, "none of the wrapper's parameters()");
      refused([&] { optimizer.add_param_group(of_others); }, "a group has options of another optimizer");
      EXPECT_EQ(optimizer.param_groups().size(), 1);
      weight.mutable_grad() = torch::ones_like(weight);
      const at::Tensor before = weight.detach().clone();
      base.add_param_group(of_others);
      refused([&] { optimizer.step(); }, "a group has options of another optimizer");
      base.param_groups().pop_back();
      base.param_groups()[0].params().push_back(torch::ones({3}).set_requires_grad(true));
      base.param_groups()[0].params().back().mutable_grad() = torch::ones({3});
      refused([&] { optimizer.step(); }, "none of the wrapper's parameters()");
      base.param_groups()[0].params().pop_back();
      EXPECT_TRUE(torch::equal(weight, before));
      base.add_param_group(of_bias);
      optimizer.step();
      EXPECT_FALSE(torch::equal(weight, before));
    };
    auto of_weight = [&](const auto& options) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>{weight}, std::make_unique<std::decay_t<decltype(options)>>(options));
      return groups;
    };
    AdamW8bit eight(fsdp, of_weight(AdamW8bitOptions(1e-2)), AdamW8bitOptions(1e-2));
    expect_looked_at(eight, AdamW8bitOptions(1e-2));
    Adafactor adafactor(fsdp, of_weight(AdafactorOptions(1e-1)), AdafactorOptions(1e-1));
    expect_looked_at(adafactor, AdafactorOptions(1e-2));
    Lamb lamb(fsdp, of_weight(torch::optim::AdamWOptions(1e-2)));
    expect_looked_at(lamb, torch::optim::AdamWOptions(1e-2));
  });
  // A group of shards for an optimizer of whole parameters.
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    auto weight = torch::ones({3}).set_requires_grad(true);
    Adafactor adafactor({weight});
    expect_contains(error_of<std::invalid_argument>(
                        [&] { adafactor.add_param_group(torch::optim::OptimizerParamGroup(fsdp.parameters())); }),
                    "is a shard of");
    Lion lion({weight});
    std::vector<torch::optim::OptimizerParamGroup> wrong;
    wrong.emplace_back(fsdp.parameters(), std::make_unique<LionOptions>(LionOptions(1e-3).beta1(2)));
    expect_contains(error_of<std::invalid_argument>([&] { lion.add_param_group(wrong[0]); }), "Lion: beta1 is 2");
  });
}

TEST(Recipes, LambsCheckpointsGoOn) {
  expect_checkpoints_go_on<Lamb>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1), 1e-5);
}

TEST(Recipes, RanksThatDisagreeAreNamed) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    const int rank = comm->rank();
    auto refused = [&](auto make, const std::string& expected) {
      expect_contains(error_of<std::invalid_argument>([&] { make(); }), expected);
    };
    refused([&] { Adafactor other(fsdp, AdafactorOptions(rank == 0 ? 1e-2 : 1e-3)); },
            "the ranks disagree about the groups of Adafactor: rank 0 has 'a group of Adafactor: lr=0.01 ");
    refused([&] { Lamb other(fsdp, torch::optim::AdamWOptions(1e-2).weight_decay(rank)); }, "weight_decay=1 ");
    refused([&] { AdamW8bit other(fsdp, AdamW8bitOptions(rank == 0 ? 1e-2 : -1)); }, "lr=-1");
    auto parameters = fsdp.parameters();
    if (rank == 1) std::swap(parameters[0], parameters[1]);
    refused([&] { Muon other(fsdp, {torch::optim::OptimizerParamGroup(parameters)}); },
            "rank 0 has 'parameter 'weight'', rank 1 has 'parameter 'bias''");
    if (rank == 1) parameters[0] = torch::ones({2}).set_requires_grad(true);
    refused([&] { Lbfgs other(fsdp, {torch::optim::OptimizerParamGroup(parameters)}); }, "none of the wrapper's");
    refused([&] { Ema ema(fsdp, {.decay = rank == 0 ? 0.9999 : 0.99990001}); },
            "the options of Ema: rank 0 has 'decay=0.9999 warmup=false', rank 1 has 'decay=0.99990001 warmup=false'");
    refused([&] { Ema ema(fsdp, {.decay = rank == 0 ? 0.9 : 1}); }, "decay=1 ");
    auto weight = torch::ones({3}).set_requires_grad(true);
    refused([&] { OSS<Lion> other({weight}, LionOptions(rank == 0 ? 1e-2 : 1e-3), comm); }, "Lion: lr=0.01 ");
    refused([&] { OSS<Adam> other({weight}, torch::optim::AdamOptions(1e-2).eps(rank == 0 ? 1e-8 : 1e-6), comm); },
            "eps=1e-06 ");
  });
}

TEST(Recipes, MistakesAreNamed) {
  auto weight = torch::ones({3}).set_requires_grad(true);
  expect_contains(error_of<std::invalid_argument>([&] { Lion other({weight}, LionOptions(-1)); }), "Lion: lr is -1");
  expect_contains(
      error_of<std::invalid_argument>([&] { ScheduleFreeAdamW other({weight}, ScheduleFreeOptions(1).beta1(0)); }),
      "ScheduleFreeAdamW: beta1 is 0, expected above 0 and below 1");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_contains(
      error_of<std::invalid_argument>([&] { ScheduleFreeAdamW other({weight}, ScheduleFreeOptions(1).r(nan)); }),
      "ScheduleFreeAdamW: r is nan, expected a finite number");
  expect_contains(error_of<std::invalid_argument>(
                      [&] { ScheduleFreeAdamW other({weight}, ScheduleFreeOptions(1).weight_lr_power(nan)); }),
                  "ScheduleFreeAdamW: weight_lr_power is nan");
  Lion lion({weight});
  weight.mutable_grad() = torch::ones({3}).to_sparse();
  expect_contains(error_of<std::invalid_argument>([&] { lion.step(); }), "a gradient of layout");
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    expect_contains(error_of<std::invalid_argument>([&] { AdamW8bit other(fsdp.parameters()); }), "is a shard of");
    expect_contains(error_of<std::invalid_argument>([&] { Adafactor other(fsdp.parameters()); }), "is a shard of");
  });
}

}  // namespace
}  // namespace tessera::recipes_test
