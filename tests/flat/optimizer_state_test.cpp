#include "optim/state/optimizer_state.h"

#include "tests/support/reference.h"

namespace tessera::optimizer_state_test {
using namespace internal;
namespace {

using namespace testing_support;

template <class Optimizer, class Options>
void expect_round_trip(Options options, Options others, const std::string& kind) {
  auto train = [](torch::optim::Optimizer& optimizer, at::Tensor& parameter, int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      (parameter * parameter).sum().backward();
      optimizer.step();
    }
  };
  at::Tensor first = torch::ones({3, 2}).requires_grad_();
  Optimizer source({first}, options);
  train(source, first, 3);
  at::Tensor second = first.detach().clone().requires_grad_();
  Optimizer target({second}, others);
  EXPECT_EQ(optimizer_kind(target), kind);
  write_options(target.param_groups()[0].options(), read_options(source.param_groups()[0].options()));
  for (const auto& [key, state] : source.state()) {
    ParameterState values = read_state(*state);
    for (auto& tensor : values.tensors) tensor.second = tensor.second.clone();
    target.state()[second.unsafeGetTensorImpl()] = make_state(kind, values);
  }
  train(source, first, 3);
  train(target, second, 3);
  EXPECT_TRUE(torch::equal(first, second)) << kind;
}

TEST(OptimizerState, WhatIsReadAndWrittenTrainsOnAlike) {
  using namespace torch::optim;
  expect_round_trip<Adam>(AdamOptions(0.1).betas({0.8, 0.9}).amsgrad(true), AdamOptions(), "Adam");
  expect_round_trip<AdamW>(AdamWOptions(0.1).weight_decay(0.3), AdamWOptions(), "AdamW");
  expect_round_trip<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true), SGDOptions(0.5), "SGD");
  expect_round_trip<RMSprop>(RMSpropOptions(0.1).momentum(0.5).centered(true), RMSpropOptions(), "RMSprop");
  expect_round_trip<Adagrad>(AdagradOptions(0.1).lr_decay(0.1), AdagradOptions(), "Adagrad");
  expect_round_trip<Muon>(MuonOptions(0.1).nesterov(false).ns_steps(3), MuonOptions(), "Muon");
  expect_round_trip<Muon>(MuonOptions::adamw(0.1), MuonOptions(), "Muon");
  expect_round_trip<AdamW8bit>(AdamW8bitOptions(0.1).min_8bit_numel(0), AdamW8bitOptions(), "AdamW8bit");
  expect_round_trip<Lion>(LionOptions(0.1).beta2(0.5), LionOptions(), "Lion");
  expect_round_trip<Adafactor>(AdafactorOptions(0.1).eps2(0.5), AdafactorOptions(), "Adafactor");
  expect_round_trip<ScheduleFreeAdamW>(ScheduleFreeOptions(0.1).warmup_steps(4).r(0.5), ScheduleFreeOptions(),
                                       "ScheduleFreeAdamW");
}

TEST(OptimizerState, WrongNamesAreRefusedWithTheRightOnes) {
  const at::Tensor tensor = torch::ones({2});
  auto make = [&](ParameterState values) {
    return error_of<std::invalid_argument>([&] { make_state("Adam", values); });
  };
  expect_contains(make({{{"exp_avg", tensor}}, {}}), "without 'step'");
  expect_contains(make({{{"momentum_buffer", tensor}}, {{"step", 1}}}), "exp_avg_sq");
  expect_contains(error_of<std::invalid_argument>([&] { make_state("Adamax", {}); }), "Adamax");
  torch::optim::AdamOptions options(0.25);
  expect_contains(error_of<std::invalid_argument>([&] { write_options(options, {{"lr", 1.0}, {"momentum", 0.5}}); }),
                  "'momentum' is not one of");
  EXPECT_EQ(options.lr(), 0.25);
  struct Foreign : torch::optim::OptimizerParamState {};
  EXPECT_THROW(read_state(Foreign()), std::invalid_argument);
}

}  // namespace
}  // namespace tessera::optimizer_state_test
