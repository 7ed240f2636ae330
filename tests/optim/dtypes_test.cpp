// Every optimizer in each floating-point dtype, against its formula in fp64.
#include <set>

#include "tests/support/reference.h"

namespace tessera::dtypes_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr double kLr = 0.05, kDecay = 0.1;

// fp64 values of one parameter and its state.
struct Exact {
  at::Tensor p, g, m, v, x;
};

struct Case {
  const char* name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make;
  std::function<void(Exact& e, int t)> step;
  double fp64_error = 1e-13;  // larger for states or products in fp32
  int steps = 3;
};

template <class Optimizer, class Options>
auto maker(Options options) {
  return [options](std::vector<at::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

void adam(Exact& e, int t, bool decoupled) {
  const at::Tensor g = decoupled ? e.g : e.g + kDecay * e.p;
  if (decoupled) e.p = e.p * (1 - kLr * kDecay);
  e.m = 0.9 * e.m + 0.1 * g;
  e.v = 0.95 * e.v + 0.05 * g * g;
  e.p = e.p - kLr / (1 - std::pow(0.9, t)) * e.m / ((e.v / (1 - std::pow(0.95, t))).sqrt() + 1e-8);
}

void adafactor(Exact& e, int t) {
  const double share = std::pow(t, -0.8);
  at::Tensor average;
  if (e.p.dim() == 2) {
    const at::Tensor rows = e.g.square().mean(1, true), columns = e.g.square().mean(0, true);
    e.m = t == 1 ? rows : e.m.lerp(rows, share);
    e.v = t == 1 ? columns : e.v.lerp(columns, share);
    average = e.m.matmul(e.v) / e.m.mean();
  } else {
    average = e.v = t == 1 ? e.g.square() : e.v.lerp(e.g.square(), share);
  }
  const at::Tensor direction = e.g * average.rsqrt();
  auto size = [](const at::Tensor& x) { return x.square().mean().sqrt().item<double>(); };
  const double step = std::min(kLr, 1 / std::sqrt(t)) * std::max(1e-3, size(e.p)) / std::max(1.0, size(direction));
  e.p = e.p * (1 - kLr * kDecay) - step * direction;
}

void lamb(Exact& e, int t) {
  e.m = 0.9 * e.m + 0.1 * e.g;
  e.v = 0.95 * e.v + 0.05 * e.g * e.g;
  const at::Tensor direction =
      e.m / (1 - std::pow(0.9, t)) / ((e.v / (1 - std::pow(0.95, t))).sqrt() + 1e-6) + kDecay * e.p;
  e.p = e.p - kLr * e.p.norm() / direction.norm() * direction;
}

void muon(Exact& e, int t) {
  if (e.p.dim() < 2) return adam(e, t, true);
  e.m = 0.95 * e.m + 0.05 * e.g;
  const at::Tensor direction = 0.95 * e.m + 0.05 * e.g;
  e.p = e.p * (1 - kLr * kDecay) -
        kLr * std::sqrt(std::max(1.0, double(e.p.size(0)) / e.p.size(1))) * orthogonalized(direction);
}

void schedule_free(Exact& e, int t) {  // m: z, x: the average
  if (t == 1) e.m = e.p, e.x = e.p;
  e.v = 0.95 * e.v + 0.05 * e.g * e.g;
  e.m = e.m - kLr * std::sqrt(1 - std::pow(0.95, t)) * (e.g / (e.v.sqrt() + 1e-8) + kDecay * e.p);
  double weights = 0;
  for (int i = 1; i <= t; ++i) weights += 1 - std::pow(0.95, i);
  e.x = e.x.lerp(e.m, (1 - std::pow(0.95, t)) / weights);
  e.p = 0.1 * e.m + 0.9 * e.x;
}

std::unique_ptr<torch::optim::Optimizer> make_muon(const std::vector<at::Tensor>& parameters) {
  const auto options = MuonOptions(kLr).weight_decay(kDecay).beta2(0.95).bfloat16(false);
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& parameter : parameters) (parameter.dim() == 2 ? matrices : others).push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  groups.emplace_back(others, std::make_unique<MuonOptions>(MuonOptions(options).use_muon(false)));
  return std::make_unique<Muon>(std::move(groups));
}

std::vector<Case> cases() {
  const auto adam_options = torch::optim::AdamOptions(kLr).betas({0.9, 0.95}).weight_decay(kDecay);
  const auto adamw_options = torch::optim::AdamWOptions(kLr).betas({0.9, 0.95}).weight_decay(kDecay);
  auto coupled = [](Exact& e, int t) { adam(e, t, false); };
  auto decoupled = [](Exact& e, int t) { adam(e, t, true); };
  return {
      {"Adam", maker<Adam>(adam_options), coupled},
      {"AdamW", maker<AdamW>(adamw_options), decoupled},
      {"HostAdam", maker<HostAdam>(adam_options), coupled},
      {"HostAdamW", maker<HostAdamW>(adamw_options), decoupled},
      {"SGD", maker<SGD>(torch::optim::SGDOptions(kLr).momentum(0.9).weight_decay(kDecay).nesterov(true)),
       [](Exact& e, int t) {
         const at::Tensor g = e.g + kDecay * e.p;
         e.m = t == 1 ? g : 0.9 * e.m + g;
         e.p = e.p - kLr * (g + 0.9 * e.m);
       }},
      {"Lion", maker<Lion>(LionOptions(kLr).weight_decay(kDecay)),
       [](Exact& e, int) {
         e.p = e.p * (1 - kLr * kDecay) - kLr * (0.9 * e.m + 0.1 * e.g).sign();
         e.m = 0.99 * e.m + 0.01 * e.g;
       }},
      {"Adafactor", maker<Adafactor>(AdafactorOptions(kLr).weight_decay(kDecay)), &adafactor},
      {"AdamW8bit", maker<AdamW8bit>(AdamW8bitOptions(kLr).beta2(0.95).weight_decay(kDecay)), decoupled, 2e-8},
      {"Lamb", maker<Lamb>(torch::optim::AdamWOptions(kLr).betas({0.9, 0.95}).eps(1e-6).weight_decay(kDecay)), &lamb},
      {"Lbfgs", maker<Lbfgs>(LbfgsOptions(kLr).max_iter(1)),
       [](Exact& e, int) { e.p = e.p - kLr * std::min(1.0, 1 / e.x.item<double>()) * e.g; }, 1e-13, 1},
      {"Muon", &make_muon, &muon, 1e-4},
      {"ScheduleFreeAdamW", maker<ScheduleFreeAdamW>(ScheduleFreeOptions(kLr).beta2(0.95).weight_decay(kDecay)),
       &schedule_free},
  };
}

// Each element has one sign in all steps, so that Lion's signs do not depend on rounding.
at::Tensor gradient(const at::Tensor& parameter, int t) {
  const auto numel = parameter.numel();
  const at::Tensor signs = torch::arange(numel).remainder(3).eq(0).to(at::kDouble) * 2 - 1;
  const at::Tensor sizes = seeded(t, [&] { return torch::rand({numel}, at::kDouble) + 0.5; });
  return (signs * sizes).view(parameter.sizes()).to(parameter.scalar_type());
}

void expect_formula(const Case& tried, at::ScalarType dtype, double limit) {
  std::vector<at::Tensor> own;
  std::vector<Exact> exact;
  for (const auto& sizes : {std::vector<int64_t>{6, 11}, {33}, {1}}) {
    own.push_back(seeded(7, [&] { return torch::randn(sizes) + 2; }).to(dtype).set_requires_grad(true));
    const at::Tensor p = own.back().detach().to(at::kDouble).clone(), none = torch::zeros_like(p);
    exact.push_back({p, none, none, none, none});
  }
  const auto optimizer = tried.make(own);
  for (int t = 1; t <= tried.steps; ++t) {
    at::Tensor sum = torch::zeros({}, at::kDouble);
    for (size_t i = 0; i < own.size(); ++i) {
      own[i].mutable_grad() = gradient(own[i], t);
      exact[i].g = own[i].grad().to(at::kDouble);
      sum += exact[i].g.abs().sum();
    }
    optimizer->step([] { return torch::ones({}); });
    for (size_t i = 0; i < own.size(); ++i) {
      exact[i].x = std::string(tried.name) == "Lbfgs" ? sum : exact[i].x;
      tried.step(exact[i], t);
      EXPECT_TRUE(torch::allclose(own[i].detach().to(at::kDouble), exact[i].p, limit, limit))
          << tried.name << " " << dtype << " step " << t << " " << own[i].sizes() << " differs by "
          << (own[i].detach().to(at::kDouble) - exact[i].p).abs().max().item<double>();
      EXPECT_TRUE(torch::equal(own[i].grad(), gradient(own[i], t))) << tried.name << " changed a gradient of " << dtype;
    }
  }
}

TEST(Dtypes, EveryOptimizerIsItsFormulaAndLeavesGradients) {
  for (const Case& tried : cases()) {
    expect_formula(tried, at::kDouble, tried.fp64_error);
    expect_formula(tried, at::kFloat, std::max(3e-6, tried.fp64_error));
    expect_formula(tried, at::kBFloat16, 0.03);
    expect_formula(tried, at::kHalf, 0.004);
  }
}

TEST(Dtypes, AdafactorStepsDoubleParameters) {
  auto weight = torch::tensor({{1.0, 2.0}, {3.0, 4.0}}, at::kDouble).set_requires_grad(true);
  const at::Tensor gradient = torch::tensor({{-1.0, 2.0}, {-3.0, 4.0}}, at::kDouble);
  weight.mutable_grad() = gradient.clone();
  Adafactor adafactor({weight}, AdafactorOptions(1e-1).weight_decay(0));
  adafactor.step();
  const at::Tensor expected = torch::tensor({{1.2121, 1.7}, {3.2846, 3.7317}}, at::kDouble);
  EXPECT_TRUE(torch::allclose(weight.detach(), expected, 0, 5e-5)) << weight;
  EXPECT_TRUE(torch::equal(weight.grad(), gradient)) << weight.grad();
}

// ---- parameters that are listed twice ----------------------------------------------------------------------------

TEST(ListedTwice, AParameterIsSteppedOnce) {
  const std::set<std::string> as_torchs{"Adam", "AdamW", "HostAdam", "HostAdamW", "SGD"};  // fused_adam_test.cpp
  for (const Case& tried : cases()) {
    if (as_torchs.contains(tried.name)) continue;
    std::vector<at::Tensor> own, expected;
    for (auto* list : {&own, &expected})
      for (const auto& sizes : {std::vector<int64_t>{4, 3}, {5}})
        list->push_back(seeded(3, [&] { return torch::randn(sizes, at::kDouble); }).set_requires_grad(true));
    const auto once = tried.make(expected);
    const auto twice = tried.make({own[0], own[1], own[0], own[1]});
    for (int step = 1; step <= 3; ++step)
      for (size_t i = 0; i < expected.size(); ++i) {
        own[i].mutable_grad() = expected[i].mutable_grad() = gradient(own[i], step);
        if (i + 1 < expected.size()) continue;
        for (const auto& optimizer : {&once, &twice}) (*optimizer)->step([] { return torch::ones({}); });
      }
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(own[i], expected[i])) << tried.name;
  }
}

TEST(ListedTwice, AParameterOfTwoGroupsIsRefused) {
  const at::Tensor weight = torch::ones({3}).set_requires_grad(true), other = torch::ones({2}).set_requires_grad(true);
  using Group = torch::optim::OptimizerParamGroup;
  const std::vector<Group> groups{Group({other}), Group({other, weight}), Group({weight})};
  const std::string problem = ": a parameter of shape [2] is in group 0 and in group 1, expected one group";
  expect_contains(error_of<std::invalid_argument>([&] { Lion lion(groups); }), "Lion" + problem);
  expect_contains(error_of<std::invalid_argument>([&] { Lamb lamb(groups); }), "Lamb" + problem);
  Lamb lamb({weight});
  expect_contains(error_of<std::invalid_argument>([&] { lamb.add_param_group(Group({weight})); }), "in group 1");
  EXPECT_EQ(lamb.param_groups().size(), 1);
}

// ---- complex numbers ----------------------------------------------------------------------------

TEST(Complex, OptimizersRefuseThemByNameWithNothingChanged) {
  for (const Case& tried : cases()) {
    auto real = torch::ones({2, 3}).set_requires_grad(true);
    auto complex = torch::ones({2, 3}, at::kComplexFloat).set_requires_grad(true);
    for (at::Tensor* parameter : {&real, &complex}) parameter->mutable_grad() = torch::ones_like(*parameter);
    const auto optimizer =
        tried.make(std::string(tried.name) == "Lbfgs" ? std::vector{complex} : std::vector{real, complex});
    expect_contains(error_of<std::invalid_argument>([&] { optimizer->step([] { return torch::ones({}); }); }),
                    "of shape [2, 3] is ComplexFloat, expected a floating-point type");
    EXPECT_TRUE(torch::equal(real, torch::ones({2, 3}))) << tried.name;
  }
  expect_contains(error_of<std::invalid_argument>([] { orthogonalized(torch::ones({2, 3}, at::kComplexFloat)); }),
                  "ComplexFloat, expected a floating-point matrix");
}

// Of a program that forgets materialize().
TEST(Deferred, OptimizersRefuseParametersWithoutValues) {
  for (const Case& tried : cases()) {
    torch::nn::Linear linear = deferred([] { return torch::nn::Linear(3, 2); });
    linear->weight.mutable_grad() = torch::ones_like(linear->weight.detach());
    const auto optimizer = tried.make({linear->weight});
    expect_contains(error_of<std::invalid_argument>([&] { optimizer->step([] { return torch::ones({}); }); }),
                    "a parameter of shape [2, 3] has no values, expected those of materialize()");
  }
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    register_module("linear", linear);
    phase = register_parameter("phase", torch::ones({3}, at::kComplexDouble));
  }
  at::Tensor forward(at::Tensor x) { return linear(x).sum() + at::real(phase * phase.conj()).sum(); }
  torch::nn::Linear linear{torch::nn::LinearOptions(3, 3).bias(false)};
  at::Tensor phase;
};
TORCH_MODULE(Mixed);

TEST(Complex, EmaAveragesThem) {
  for (const int stage : {0, 3})
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = zero(Mixed(), torch::optim::SGDOptions(0.1), comm, {.stage = stage});
      Ema ema(model, {.decay = 0.75});
      {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& parameter : model.parameters())
          parameter.add_(parameter.is_complex() ? at::Scalar(c10::complex<double>(0, 4)) : at::Scalar(4));
      }
      ema.update();
      auto averaged = ema.swap_in();
      EXPECT_TRUE(torch::allclose(model.full_state_dict()["phase"],
                                  torch::full({3}, c10::complex<double>(1, 1), at::kComplexDouble)));
    });
}

TEST(Complex, QuantizedModelsFreezeThem) {
  Mixed net;
  quantize_linears(*net, {.lora = {.rank = 2}});
  EXPECT_FALSE(net->phase.requires_grad());
}

TEST(Complex, SyncBatchNormRefusesThem) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(3));
    convert_sync_batch_norm(*net, *comm);
    expect_contains(error_of<std::invalid_argument>([&] { net->forward(torch::ones({4, 3}, at::kComplexFloat)); }),
                    "the input is ComplexFloat, expected a floating-point type");
  });
}

double lr_of(const torch::optim::Optimizer& optimizer, size_t group) {
  return optimizer.param_groups()[group].options().get_lr();
}

struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  explicit OwnOptions(double lr) : lr_(lr) {}
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
  double lr_;
};
// Steps by the options of each group, as a program's own optimizer would.
struct OwnOptimizer : torch::optim::Optimizer {
  explicit OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        OwnOptions defaults = OwnOptions(1))
      : Optimizer(groups, std::make_unique<OwnOptions>(defaults)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    for (const auto& group : param_groups())
      for (const at::Tensor& parameter : group.params())
        if (parameter.grad().defined()) at::Tensor(parameter).add_(parameter.grad(), -group.options().get_lr());
    return {};
  }
};

// libtorch 2.15 gives a group of such options the optimizer's defaults.
TEST(GroupOptions, StayThoseOfTheGroup) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto parameter = [] { return torch::ones({4}).set_requires_grad(true); };
    const auto group = [](const at::Tensor& of, auto options) {
      return torch::optim::OptimizerParamGroup({of}, std::make_unique<decltype(options)>(options));
    };
    Lion lion({group(parameter(), LionOptions(0.5)), {{parameter()}}}, LionOptions(0.25));
    lion.add_param_group(group(parameter(), LionOptions(0.75)));
    OSS<Lion> of_lion({group(parameter(), LionOptions(0.5)), {{parameter()}}}, LionOptions(0.25), comm);
    of_lion.add_param_group(group(parameter(), LionOptions(0.75)));
    for (const torch::optim::Optimizer* optimizer :
         {static_cast<torch::optim::Optimizer*>(&lion), static_cast<torch::optim::Optimizer*>(&of_lion)}) {
      EXPECT_EQ(lr_of(*optimizer, 0), 0.5);
      EXPECT_EQ(lr_of(*optimizer, 1), 0.25);
      EXPECT_EQ(lr_of(*optimizer, 2), 0.75);
    }
    const at::Tensor own = parameter();
    OSS<OwnOptimizer> of_own({group(own, OwnOptions(0.5))}, OwnOptions(0.25), comm);
    own.mutable_grad() = torch::ones({4});
    of_own.step();
    EXPECT_TRUE(torch::equal(own.detach(), torch::full({4}, 0.5)));
    // libtorch's own options are merged by libtorch: a value that is the class's default may become the optimizer's.
    const auto adam = [&] {
      return std::vector{group(parameter(), torch::optim::AdamOptions(1e-3).weight_decay(0.1))};
    };
    const auto defaults = torch::optim::AdamOptions(0.5);
    EXPECT_EQ(lr_of(OSS<torch::optim::Adam>(adam(), defaults, comm), 0),
              lr_of(torch::optim::Adam(adam(), defaults), 0));
    EXPECT_THROW(Lion({group(parameter(), torch::optim::AdamOptions())}), std::invalid_argument);
  });
}

}  // namespace
}  // namespace tessera::dtypes_test
