#include <tessera/optim/lr_schedules.h>

#include <tessera/checkpoint.h>
#include <tessera/zero.h>
#include <cmath>
#include <limits>

#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::lr_schedules_test {
using namespace internal;
namespace {

using namespace testing_support;

double rate_of(torch::optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

torch::optim::SGD sgd_of(const std::vector<double>& rates) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : rates)
    groups.emplace_back(std::vector{torch::zeros({1}, torch::requires_grad())},
                        std::make_unique<torch::optim::SGDOptions>(rate));
  return torch::optim::SGD(std::move(groups), torch::optim::SGDOptions(0.1));
}

TEST(Schedules, WarmUpLinearlyThenFallAlongHalfACosine) {
  auto optimizer = sgd_of({2.0, 4.0});
  WarmupCosineLR schedule(optimizer, 4, 104, 0.1);
  std::vector<double> rates;
  for (int step = 0; step < 110; ++step) {
    rates.push_back(rate_of(optimizer));
    EXPECT_DOUBLE_EQ(rate_of(optimizer, 1), 2 * rates.back());
    EXPECT_EQ(schedule.current_step(), step);
    schedule.step();
  }
  EXPECT_DOUBLE_EQ(rates[0], 0.5);
  EXPECT_DOUBLE_EQ(rates[3], 2.0);
  EXPECT_DOUBLE_EQ(rates[4], 2.0);
  EXPECT_NEAR(rates[53], 1.1, 0.02);  // half way
  EXPECT_NEAR(rates[103], 0.2, 1e-12);
  EXPECT_DOUBLE_EQ(rates[109], 0.2);
  for (size_t step = 5; step < 104; ++step) EXPECT_LT(rates[step], rates[step - 1]);
  for (const int64_t step : {0, 50, 103}) {
    schedule.set_step(step);
    EXPECT_EQ(rate_of(optimizer), rates[static_cast<size_t>(step)]);
  }
}

TEST(Schedules, ShortOnesAndConstantOnes) {
  auto first_rates = [](auto make) {
    auto optimizer = sgd_of({1.0});
    auto schedule = make(optimizer);
    std::vector<double> rates{rate_of(optimizer)};
    schedule.step();
    rates.push_back(rate_of(optimizer));
    return rates;
  };
  using Rates = std::vector<double>;
  EXPECT_EQ(first_rates([](auto& of) { return WarmupCosineLR(of, 0, 1); }), (Rates{1.0, 0.0}));
  EXPECT_EQ(first_rates([](auto& of) { return WarmupCosineLR(of, 1, 1, 0.5); }), (Rates{1.0, 0.5}));
  EXPECT_EQ(first_rates([](auto& of) { return WarmupCosineLR(of, 2, 2); }), (Rates{0.5, 1.0}));
  EXPECT_EQ(first_rates([](auto& of) { return WarmupLR(of, 0); }), (Rates{1.0, 1.0}));
  EXPECT_EQ(first_rates([](auto& of) { return WarmupLR(of, 2); }), (Rates{0.5, 1.0}));
  EXPECT_EQ(first_rates([](auto& of) { return LambdaLR(of, [](int64_t step) { return 3.0 - step; }); }),
            (Rates{3.0, 2.0}));
  auto optimizer = sgd_of({1.0});
  expect_contains(error_of<std::invalid_argument>([&] { WarmupCosineLR(optimizer, 5, 4); }),
                  "warmup_steps is 5, expected 0 to 4");
  expect_contains(error_of<std::invalid_argument>([&] { WarmupCosineLR(optimizer, 0, 0); }), "total_steps is 0");
  expect_contains(error_of<std::invalid_argument>([&] { LambdaLR(optimizer, nullptr); }),
                  "LambdaLR: the factor is empty");
  for (const double fraction : {-0.1, std::nan(""), std::numeric_limits<double>::infinity()})
    expect_contains(error_of<std::invalid_argument>([&] { WarmupCosineLR(optimizer, 0, 9, fraction); }),
                    "final_fraction is ");
  EXPECT_EQ(rate_of(optimizer), 1.0);
  // A group added later has the peak that it was added with.
  WarmupLR schedule(optimizer, 4);
  optimizer.add_param_group(sgd_of({8.0}).param_groups()[0]);
  schedule.step();
  EXPECT_EQ(rate_of(optimizer, 1), 4.0);
}

TEST(Schedules, ContinueAfterALoadInEveryStage) {
  for (const int stage : {0, 1, 2, 3}) {
    const TemporaryFolder folder;
    std::vector<double> expected;
    auto under = [&](int world, auto body) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = zero(seeded(1, [] { return torch::nn::Linear(3, 5); }), torch::optim::AdamWOptions(0.1), comm,
                          ZeroOptions{.stage = stage});
        WarmupCosineLR schedule(model.optimizer(), 3, 20, 0.1);
        auto step = [&] {
          model.zero_grad();
          model(on_rank_device(torch::ones({2, 3}))).sum().backward();
          model.step();
          schedule.step();
          return rate_of(model.optimizer());
        };
        body(*comm, model, schedule, step);
      });
    };
    under(2, [&](auto& comm, auto& model, auto& schedule, auto step) {
      for (int i = 0; i < 6; ++i) step();
      save_checkpoint(folder / "a", {model, model.optimizer(), schedule});
      std::vector<double> rates;
      for (int i = 0; i < 5; ++i) rates.push_back(step());
      if (comm.rank() == 0) expected = rates;
    });
    under(3, [&](auto&, auto& model, auto& schedule, auto step) {
      load_checkpoint(folder / "a", {model, model.optimizer(), schedule});
      EXPECT_EQ(schedule.current_step(), 6);
      for (const double rate : expected) EXPECT_EQ(step(), rate) << "stage " << stage;
    });
  }
}

}  // namespace
}  // namespace tessera::lr_schedules_test
