// OSS alone: the test all-reduces gradients itself.
#include <torch/torch.h>

#include <sstream>
#include <thread>
#include <utility>

#include "core/layout/partition.h"
#include "oss/parameter_buckets.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::oss_test {
using namespace internal;
namespace {

using namespace testing_support;
using torch::optim::Adam;
using torch::optim::AdamOptions;

std::vector<at::Tensor> make_parameters(uint64_t seed, const std::vector<std::vector<int64_t>>& shapes) {
  return seeded(seed, [&] {
    std::vector<at::Tensor> parameters;
    for (const auto& shape : shapes) parameters.push_back(torch::randn(shape).requires_grad_());
    return parameters;
  });
}

const std::vector<std::vector<int64_t>> kShapes = {{5, 3}, {7}, {}, {0}, {2, 2, 2}, {11}, {300, 2}, {1}};

// Sets equal gradients on every rank, as after an all-reduce.
void set_gradients(std::vector<at::Tensor>& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad()) continue;
    parameters[i].mutable_grad() =
        seeded(1000 * step + i, [&] { return torch::randn(parameters[i].sizes(), parameters[i].scalar_type()); });
  }
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_values(a[i].detach(), b[i].detach())) << "parameter " << i;
}

template <class Optimizer, class Options>
void expect_parity(int world, Options options) {
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, kShapes), reference = make_parameters(1, kShapes);
    OSS<Optimizer> sharded(own, options, comm, {.broadcast_bucket_bytes = 100});
    Optimizer whole(reference, options);
    for (int step = 0; step < 6; ++step) {
      set_gradients(own, step);
      set_gradients(reference, step);
      sharded.step();
      whole.step();
    }
    expect_equal(own, reference);
  });
}

TEST(Oss, EqualsTheUnshardedOptimizerForAllOfTorchs) {
  using namespace torch::optim;
  for (int world : {1, 2, 3, 5}) {
    expect_parity<Adam>(world, AdamOptions(1e-2).amsgrad(true));
    expect_parity<AdamW>(world, AdamWOptions(1e-2).weight_decay(0.1));
    expect_parity<SGD>(world, SGDOptions(1e-2).momentum(0.9));
    expect_parity<RMSprop>(world, RMSpropOptions(1e-2).momentum(0.5).centered(true));
    expect_parity<Adagrad>(world, AdagradOptions(1e-2).lr_decay(0.1));
  }
}

// Some parameters are stepped, and sent while the next ones are stepped; `least` sets how many at a time.
template <class Optimizer, class Options>
void expect_parity_in_turns(Options options) {
  for (const int64_t least : {int64_t{1}, int64_t{200}, int64_t{8} << 20}) {
    const auto back =
        c10::make_scope_exit([before = std::exchange(least_step_bytes, least)] { least_step_bytes = before; });
    for (int world : {2, 3, 5}) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto own = make_parameters(1, kShapes), reference = make_parameters(1, kShapes);
        own[1].requires_grad_(false);
        reference[1].requires_grad_(false);
        std::vector<at::Tensor> late = make_parameters(2, {{9, 9}, {0}}),
                                late_reference = make_parameters(2, {{9, 9}, {0}});
        OSS<Optimizer> sharded(own, options, comm, {.broadcast_bucket_bytes = 100});
        Optimizer whole(reference, options);
        for (int step = 0; step < 5; ++step) {
          if (step == 2) {
            sharded.add_param_group(torch::optim::OptimizerParamGroup(late));
            whole.add_param_group(torch::optim::OptimizerParamGroup(late_reference));
            own[1].requires_grad_(true);  // unfrozen
            reference[1].requires_grad_(true);
          }
          for (auto* parameters : {&own, &reference, &late, &late_reference}) set_gradients(*parameters, step);
          own[6].mutable_grad() = reference[6].mutable_grad() = step % 2 == 0 ? own[6].grad() : at::Tensor();
          sharded.step();
          whole.step();
        }
        expect_equal(own, reference);
        expect_equal(late, late_reference);
      });
    }
  }
}

TEST(Oss, StepsInTurnsAreThoseOfTheUnshardedOptimizer) {
  expect_parity_in_turns<tessera::Adam>(AdamOptions(1e-2).amsgrad(true));
  expect_parity_in_turns<tessera::AdamW>(torch::optim::AdamWOptions(1e-2));
  expect_parity_in_turns<tessera::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9));
  if (run_ranks_on_devices == nullptr) expect_parity_in_turns<HostAdamW>(torch::optim::AdamWOptions(1e-2));
}

// OSS steps one parameter while it sends the other, which shares its memory.
TEST(Oss, TwoParametersOfOneMemoryInTurns) {
  const auto back = c10::make_scope_exit([before = std::exchange(least_step_bytes, 1)] { least_step_bytes = before; });
  for (const bool peer_memory : {true, false}) {
    InitOptions options;
    options.peer_memory = peer_memory;
    run_ranks(
        2,
        [](std::shared_ptr<Communicator> comm) {
          const auto halves = [] {
            const at::Tensor both = seeded(1, [] { return torch::randn({800, 400}); });
            return std::vector<at::Tensor>{both.narrow(0, 0, 400).detach().requires_grad_(),
                                           both.narrow(0, 400, 400).detach().requires_grad_()};
          };
          auto own = halves(), reference = halves();
          OSS<tessera::Adam> sharded(own, AdamOptions(1e-2), comm);
          tessera::Adam whole(reference, AdamOptions(1e-2));
          for (int step = 0; step < 4; ++step) {
            set_gradients(own, step);
            set_gradients(reference, step);
            sharded.step();
            whole.step();
          }
          expect_equal(own, reference);
        },
        options);
  }
}

// Bytes that this rank had sent by each call.
thread_local std::vector<int64_t> sent_by_call;
thread_local Communicator* watched = nullptr;
struct WatchedSgd : torch::optim::SGD, ChosenStep {
  using torch::optim::SGD::SGD;
  void step_parameters(const std::vector<at::Tensor>& parameters) override {
    at::NoGradGuard no_grad;
    sent_by_call.push_back(watched->traffic().sent_bytes);
    for (const at::Tensor& parameter : parameters)
      if (parameter.grad().defined()) parameter.sub_(parameter.grad());
  }
};

TEST(Oss, ParametersTravelWhileTheNextOnesAreStepped) {
  const auto back = c10::make_scope_exit([before = std::exchange(least_step_bytes, 1)] { least_step_bytes = before; });
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, std::vector<std::vector<int64_t>>(6, {600, 600}));  // a bucket each
    OSS<WatchedSgd> optimizer(parameters, torch::optim::SGDOptions(1), comm);
    set_gradients(parameters, 0);
    watched = comm.get();
    sent_by_call.clear();
    const int64_t before = comm->traffic().sent_bytes;
    optimizer.step();
    ASSERT_EQ(sent_by_call.size(), 3U);
    EXPECT_EQ(sent_by_call[0], before);
    for (int call = 1; call < 3; ++call)
      EXPECT_EQ(sent_by_call[call] - sent_by_call[call - 1], static_cast<int64_t>(parameters[0].nbytes()));
  });
}

// OSS must call a user's override of step().
thread_local int own_steps = 0;
template <class Base>
struct OwnStep : Base {
  using Base::Base;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    ++own_steps;
    return Base::step(closure);
  }
};

TEST(Oss, AnOptimizerThatIsDerivedFromOursKeepsItsStep) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (const bool offloads : {false, true}) {
      own_steps = 0;
      auto parameters = make_parameters(1, kShapes);
      OssOptions options;
      options.offload.params = offloads;
      OSS<OwnStep<tessera::AdamW>> fused(parameters, torch::optim::AdamWOptions(1e-2), comm, options);
      OSS<OwnStep<HostAdam>> host(make_parameters(1, kShapes), AdamOptions(1e-2), comm, options);
      set_gradients(parameters, 0);
      fused.step();
      EXPECT_EQ(own_steps, 1);
      host.step();
      EXPECT_EQ(own_steps, 2);
    }
  });
}

// If one parameter cannot be stepped, none is stepped or sent.
TEST(Oss, WhatCannotBeSteppedIsRefusedBeforeTheFirstTurn) {
  const auto back = c10::make_scope_exit([before = std::exchange(least_step_bytes, 1)] { least_step_bytes = before; });
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, {{40, 40}, {40, 40}, {40, 40}, {40, 40}});
    OSS<tessera::Adam> optimizer(parameters, AdamOptions(1e-2), comm);
    set_gradients(parameters, 0);
    for (int last : {2, 3}) parameters[last].mutable_grad() = parameters[last].grad().to_sparse();
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : parameters) before.push_back(parameter.detach().clone());
    expect_contains(error_of<std::invalid_argument>([&] { optimizer.step(); }), "Sparse");
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(torch::equal(parameters[i], before[i])) << i;
  });
}

TEST(Oss, EachRankKeepsTheStateOfItsOwnParametersOnly) {
  on_ranks(4, [&](std::shared_ptr<Communicator> comm) {
    std::vector<std::vector<int64_t>> shapes(16, {32, 8});
    auto parameters = make_parameters(1, shapes);
    OSS<Adam> optimizer(parameters, AdamOptions(1e-2), comm);
    set_gradients(parameters, 0);
    optimizer.step();
    EXPECT_EQ(optimizer.state().size(), 4u);
    EXPECT_EQ(optimizer.owned_bytes(), std::vector<int64_t>(4, 4 * 32 * 8 * 4));
  });
}

TEST(Oss, OneGiantParameterAndMoreRanksThanParameters) {
  on_ranks(5, [&](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, {{700, 800}, {3}}), reference = make_parameters(1, {{700, 800}, {3}});
    OSS<Adam> sharded(own, AdamOptions(1e-2), comm);
    Adam whole(reference, AdamOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      set_gradients(own, step);
      set_gradients(reference, step);
      sharded.step();
      whole.step();
    }
    expect_equal(own, reference);
  });
}

TEST(Oss, GroupsKeepTheirOptionsAndLearningRatesMayChange) {
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, kShapes), reference = make_parameters(1, kShapes);
    auto groups_of = [](std::vector<at::Tensor>& all) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>(all.begin(), all.begin() + 3));
      groups.emplace_back(std::vector<at::Tensor>(all.begin() + 3, all.begin() + 6),
                          std::make_unique<AdamOptions>(AdamOptions(0.5).weight_decay(0.1)));
      return groups;
    };
    OSS<Adam> sharded(groups_of(own), AdamOptions(1e-2), comm);
    Adam whole(groups_of(reference), AdamOptions(1e-2));
    torch::optim::StepLR sharded_schedule(sharded, 2, 0.1), whole_schedule(whole, 2, 0.1);
    for (int step = 0; step < 6; ++step) {
      if (step == 2) {  // adds a group by OSS's own function, and through the base class
        const std::vector<at::Tensor> more(own.begin() + 6, own.end());
        if (comm->size() == 3) sharded.add_param_group(more);
        whole.add_param_group(std::vector<at::Tensor>(reference.begin() + 6, reference.end()));
      }
      if (step == 4) {
        sharded.param_groups()[0].options().set_lr(0.03);
        whole.param_groups()[0].options().set_lr(0.03);
      }
      set_gradients(own, step);
      set_gradients(reference, step);
      sharded.step();
      whole.step();
      sharded_schedule.step();
      whole_schedule.step();
    }
    expect_equal(own, reference);
  });
}

// Takes two steps with both optimizers, whose parameters must then be equal.
void expect_equal_steps(OSS<Adam>& sharded, std::vector<at::Tensor>& own, Adam& whole,
                        std::vector<at::Tensor>& reference) {
  for (int step = 0; step < 2; ++step) {
    set_gradients(own, step);
    set_gradients(reference, step);
    sharded.step();
    whole.step();
  }
  expect_equal(own, reference);
}

TEST(Oss, GroupsAddedThroughTheBaseClassAreTaken) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, {{4}, {5}}), reference = make_parameters(1, {{4}, {5}});
    OSS<Adam> sharded({own[0]}, AdamOptions(1e-2), comm);
    Adam whole({reference[0]}, AdamOptions(1e-2));
    static_cast<torch::optim::Optimizer&>(sharded).add_param_group(std::vector<at::Tensor>{own[1]});
    whole.add_param_group(std::vector<at::Tensor>{reference[1]});
    expect_equal_steps(sharded, own, whole, reference);
  });
}

// As after a warm-up: drops the moments, and training continues.
TEST(Oss, TheStateOfItsParametersCanBeCleared) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, kShapes), reference = make_parameters(1, kShapes);
    OSS<Adam> oss(own, AdamOptions(1e-2), comm);
    torch::optim::Optimizer& sharded = oss;  // passed to functions as the base class
    Adam whole(reference, AdamOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        for (const at::Tensor& parameter : own)
          EXPECT_EQ(sharded.state().count(parameter.unsafeGetTensorImpl()), oss.owns(parameter) ? 1u : 0u);
        sharded.state().clear();
        whole.state().clear();
      }
      set_gradients(own, step);
      set_gradients(reference, step);
      sharded.step();
      whole.step();
    }
    expect_equal(own, reference);
  });
}

TEST(Oss, ClosuresRunOnceAndTheirLossComesBack) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, {{4}, {5}});
    OSS<Adam> optimizer(parameters, AdamOptions(1e-2), comm);
    int calls = 0;
    at::NoGradGuard no_grad;
    const at::Tensor loss = optimizer.step([&] {
      ++calls;
      optimizer.zero_grad();
      at::Tensor sum = (parameters[0] * parameters[0]).sum() + parameters[1].sum();
      sum.backward();
      return sum;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(loss.defined());
  });
}

TEST(Oss, FrozenTiedTransposedAndSixteenBitParametersAreOrdinary) {
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    auto make = [] {
      auto all = make_parameters(1, {{6, 4}, {9}, {3}, {600, 500}});
      all[1].set_requires_grad(false);
      all[0] = all[0].detach().t().requires_grad_();
      all[2] = all[2].detach().to(torch::kBFloat16).requires_grad_();
      all[3] = all[3].detach().t().requires_grad_();
      return all;
    };
    auto own = make(), reference = make();
    auto twice = own;
    twice.push_back(own[0]);
    OSS<torch::optim::SGD> sharded(twice, torch::optim::SGDOptions(0.1), comm);
    torch::optim::SGD whole(reference, torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      if (step == 2) {
        own[1].set_requires_grad(true);
        reference[1].set_requires_grad(true);
      }
      set_gradients(own, step);
      set_gradients(reference, step);
      sharded.step();
      whole.step();
    }
    expect_equal(own, reference);
    EXPECT_EQ(own[0].strides(), reference[0].strides());
  });
}

// Bit-equal, including copies of other ranks' parameters.
TEST(Oss, AfterALoadCopiesAreAsRoundedAsBefore) {
  constexpr int kHalf = 3;
  for (const int world : {2, 3}) {
    const TemporaryFolder folder;
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      struct Run {
        torch::nn::Sequential net = seeded(1, [] {
          return torch::nn::Sequential(torch::nn::Linear(6, 20), torch::nn::Tanh(), torch::nn::Linear(20, 5));
        });
        OSS<Adam> optimizer;
        DistributedDataParallel<torch::nn::Sequential> ddp;
        explicit Run(const std::shared_ptr<Communicator>& of)
            : optimizer((freeze(), net->parameters()), AdamOptions(1e-2), of, {.broadcast_dtype = at::kBFloat16}),
              ddp(net, of) {}
        void freeze() { net->parameters()[1].set_requires_grad(false); }
        void train(int begin, int end) {
          for (int step = begin; step < end; ++step) {
            optimizer.zero_grad();
            ddp(seeded(10 * step + ddp.comm()->rank(), [] { return torch::randn({4, 6}); })).square().mean().backward();
            optimizer.step();
          }
        }
      };
      Run whole(comm);
      whole.train(0, kHalf);
      save_checkpoint(folder / "half", whole.ddp, whole.optimizer);
      Run resumed(comm);
      load_checkpoint(folder / "half", resumed.ddp, resumed.optimizer);
      expect_equal(resumed.net->parameters(), whole.net->parameters());
      whole.train(kHalf, 2 * kHalf);
      resumed.train(kHalf, 2 * kHalf);
      expect_equal(resumed.net->parameters(), whole.net->parameters());
    });
  }
}

TEST(Oss, BroadcastInSixteenBitsKeepsTheOwnersValues) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, {{50}, {60}, {600, 500}}), reference = make_parameters(1, {{50}, {60}, {600, 500}});
    OSS<Adam> sharded(own, AdamOptions(1e-2), comm, {.broadcast_dtype = torch::kBFloat16});
    Adam whole(reference, AdamOptions(1e-2));
    const auto before = comm->traffic();
    for (int step = 0; step < 4; ++step) {
      set_gradients(own, step);
      set_gradients(reference, step);
      sharded.step();
      whole.step();
    }
    for (size_t i = 0; i < own.size(); ++i) {
      const at::Tensor exact = reference[i].detach();
      EXPECT_TRUE(
          torch::equal(own[i].detach(), sharded.owns(own[i]) ? exact : exact.to(torch::kBFloat16).to(torch::kFloat)));
    }
    int64_t owned_numel = 0;
    for (const auto& parameter : own) owned_numel += sharded.owns(parameter) ? parameter.numel() : 0;
    EXPECT_LT(comm->traffic().sent_bytes - before.sent_bytes, 4 * owned_numel * 2 + 2000);
  });
}

TEST(Oss, ClippingCountsEachParameterOnce) {
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    // Without kShapes' empty parameter: torch has no infinity norm of no elements.
    const std::vector<std::vector<int64_t>> shapes = {{5, 3}, {7}, {}, {300, 2}, {1}};
    auto own = make_parameters(1, shapes), reference = make_parameters(1, shapes);
    OSS<Adam> sharded(own, AdamOptions(1e-2), comm);
    for (double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
      set_gradients(own, 1);
      set_gradients(reference, 1);
      const double expected = torch::nn::utils::clip_grad_norm_(reference, 0.5, norm_type);
      EXPECT_NEAR(sharded.clip_grad_norm_(0.5, norm_type), expected, 1e-4 * expected);
      for (size_t i = 0; i < own.size(); ++i)
        EXPECT_TRUE(torch::allclose(own[i].grad(), reference[i].grad(), 1e-5, 1e-7));
    }
  });
}

TEST(OssState, ConsolidatedStateTrainsOnInAnotherWorldAndInOneProcess) {
  OptimizerStateDict saved;
  std::vector<at::Tensor> values;
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, kShapes);
    OSS<Adam> optimizer(parameters, AdamOptions(1e-2), comm);
    for (int step = 0; step < 3; ++step) {
      set_gradients(parameters, step);
      optimizer.step();
    }
    optimizer.param_groups()[0].options().set_lr(0.02);
    optimizer.consolidate_state_dict(1);
    if (comm->rank() != 1) {
      EXPECT_THROW(optimizer.state_dict(), std::logic_error);
      return;
    }
    saved = optimizer.state_dict();
    for (const auto& parameter : parameters) values.push_back(parameter.detach().clone());
  });
  auto continued = [&](torch::optim::Optimizer& optimizer, std::vector<at::Tensor>& parameters) {
    for (int step = 3; step < 6; ++step) {
      set_gradients(parameters, step);
      optimizer.step();
    }
  };
  std::vector<at::Tensor> expected = make_parameters(1, kShapes);
  Adam whole(expected, AdamOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    set_gradients(expected, step);
    whole.step();
  }
  whole.param_groups()[0].options().set_lr(0.02);
  continued(whole, expected);
  for (int world : {1, 2, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      std::vector<at::Tensor> parameters;
      for (const auto& value : values) parameters.push_back(on_rank_device(value.clone().requires_grad_()));
      OSS<Adam> optimizer(parameters, AdamOptions(1.0), comm);
      {
        const c10::InferenceMode inference(world == 2);  // the states must not be inference tensors
        optimizer.load_state_dict(saved);
      }
      continued(optimizer, parameters);
      expect_equal(parameters, expected);
    });
  }
}

TEST(OssState, FilesAreThoseOfTheOptimizerItself) {
  std::stringstream file;
  std::vector<at::Tensor> expected = make_parameters(1, {{6}, {7}, {8}});
  Adam whole(expected, AdamOptions(1e-2));
  auto advance = [](torch::optim::Optimizer& optimizer, std::vector<at::Tensor>& parameters, int from, int to) {
    for (int step = from; step < to; ++step) {
      set_gradients(parameters, step);
      optimizer.step();
    }
  };
  advance(whole, expected, 0, 3);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, {{6}, {7}, {8}});
    OSS<Adam> optimizer(parameters, AdamOptions(1e-2), comm);
    advance(optimizer, parameters, 0, 3);
    optimizer.consolidate_state_dict(0);
    if (comm->rank() == 0) torch::save(optimizer, file);
  });
  std::vector<at::Tensor> plain;
  for (const auto& parameter : expected) plain.push_back(parameter.detach().clone().requires_grad_());
  Adam loaded(plain, AdamOptions(1e-2));
  torch::load(loaded, file);
  advance(whole, expected, 3, 5);
  advance(loaded, plain, 3, 5);
  expect_equal(plain, expected);
}

TEST(OssState, WhatDoesNotFitIsListedAndChangesNothing) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, {{4}, {5}});
    OSS<Adam> optimizer(
        std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup({parameters[0]}),
                                                       torch::optim::OptimizerParamGroup({parameters[1]})},
        AdamOptions(1e-2), comm);
    set_gradients(parameters, 0);
    optimizer.step();
    optimizer.consolidate_state_dict(-1);
    OptimizerStateDict bad = optimizer.state_dict();
    for (auto& [index, state] : bad.state)
      for (auto& [name, tensor] : state.tensors) tensor = torch::zeros({9});
    bad.groups[0].options[0].second = 0.5;
    const std::string text = error_of<std::invalid_argument>([&] { optimizer.load_state_dict(bad); });
    expect_contains(text, "exp_avg of parameter 0 has shape [9], expected [4]");
    expect_contains(text, "exp_avg_sq of parameter 1");
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-2);
    bad = optimizer.state_dict();
    bad.groups[0].options[0].second = 0.5;
    bad.groups[1].options[0].first = "rate";
    expect_contains(error_of<std::invalid_argument>([&] { optimizer.load_state_dict(bad); }), "option 'rate'");
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-2);
    bad = optimizer.state_dict();
    bad.state.at(0).tensors[0].first = "average";  // of one rank's parameter; all ranks must refuse it
    expect_contains(error_of<std::invalid_argument>([&] { optimizer.load_state_dict(bad); }), "got average");
    bad = optimizer.state_dict();
    bad.kind = "SGD";
    bad.groups[0].parameter_count = 3;
    expect_contains(error_of<std::invalid_argument>([&] { optimizer.load_state_dict(bad); }),
                    "it is of SGD, expected Adam");
  });
}

TEST(OssMistakes, AreNamed) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto parameters = make_parameters(1, {{4}, {5}});
    expect_contains(error_of<std::invalid_argument>(
                        [&] { OSS<torch::optim::LBFGS>(parameters, torch::optim::LBFGSOptions(1.0), comm); }),
                    "LBFGS searches along one direction");
    expect_contains(error_of<std::invalid_argument>([&] { OSS<Adam>({parameters[0] * 2}, AdamOptions(1e-2), comm); }),
                    "expected a leaf");
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{parameters[0]});
    groups.emplace_back(parameters);
    expect_contains(error_of<std::invalid_argument>([&] { OSS<Adam>(groups, AdamOptions(1e-2), comm); }),
                    "is in group 0 and in group 1");
    groups.pop_back();
    groups[0].set_options(std::make_unique<torch::optim::SGDOptions>(1e-2));
    expect_contains(error_of<std::invalid_argument>([&] { OSS<Adam>(groups, AdamOptions(1e-2), comm); }),
                    "group 0 has options of another optimizer");
    for (const at::ScalarType dtype : {at::kFloat8_e5m2, at::kInt})
      expect_contains(error_of<std::invalid_argument>(
                          [&] { OSS<Adam>(parameters, AdamOptions(1e-2), comm, {.broadcast_dtype = dtype}); }),
                      std::string("OssOptions::broadcast_dtype is ") + c10::toString(dtype) + ", expected Half");
    auto other = make_parameters(1, {{4 + comm->rank()}});
    expect_contains(error_of<std::invalid_argument>([&] { OSS<Adam>(other, AdamOptions(1e-2), comm); }), "rank 1 has");
    torch::nn::Linear linear(4, 4);
    FullyShardedDataParallel fsdp(linear, comm);
    expect_contains(error_of<std::invalid_argument>([&] { OSS<Adam>(fsdp.parameters(), AdamOptions(1e-2), comm); }),
                    "is a shard of FullyShardedDataParallel");
    OSS<Adam> optimizer(parameters, AdamOptions(1e-2), comm);
    EXPECT_THROW(optimizer.owner(torch::ones({1})), std::invalid_argument);
  });
}

// The bucket of the frozen parameter would be larger than the address space.
TEST(OssMistakes, AGroupWithoutMemoryChangesNothing) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto own = make_parameters(1, {{4}, {5}, {6}}), reference = make_parameters(1, {{4}, {5}, {6}});
    OSS<Adam> sharded(std::vector<at::Tensor>(own.begin(), own.end() - 1), AdamOptions(1e-2), comm);
    Adam whole(reference, AdamOptions(1e-2));
    const std::vector<int64_t> before = sharded.owned_bytes();
    const at::Tensor huge = own[0].detach().narrow(0, 0, 1).clone().expand({int64_t{1} << 45});
    EXPECT_ANY_THROW(sharded.add_param_group(std::vector<at::Tensor>{own[2], huge}));
    EXPECT_EQ(sharded.owned_bytes(), before);
    EXPECT_FALSE(sharded.has(own[2]));
    EXPECT_EQ(sharded.local().param_groups().size(), 1U);
    sharded.add_param_group(std::vector<at::Tensor>{own[2]});
    expect_equal_steps(sharded, own, whole, reference);
  });
}

// Converts a small parameter, which shares a bucket, and a large one with its own.
TEST(OssMistakes, ConversionsAreNoticedBeforeAnythingIsChanged) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (size_t converted : {size_t{0}, size_t{1}}) {
      auto parameters = make_parameters(1, {{5, 3}, {600, 600}, {7}});
      OSS<Adam> optimizer(parameters, AdamOptions(1e-2), comm);
      set_gradients(parameters, 0);
      optimizer.step();
      parameters[converted].set_data(parameters[converted].detach().to(torch::kDouble));
      std::vector<at::Tensor> before;
      for (const at::Tensor& parameter : parameters) before.push_back(parameter.detach().clone());
      set_gradients(parameters, 1);
      expect_contains(error_of<std::logic_error>([&] { optimizer.step(); }),
                      "OSS: parameter number " + std::to_string(converted) + " is Double");
      expect_equal(parameters, before);
    }
  });
}

TEST(Oss, ASecondThreadsCallsDuringAStepAreRefusedAndTheStepGoesOn) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    const auto parameter = torch::ones({4}, comm->device()).requires_grad_(true);
    OSS<torch::optim::SGD> optimizer({parameter}, torch::optim::SGDOptions(0.5), comm);
    const auto expect_refused = [](const std::string& call, const std::function<void()>& work) {
      std::string error;
      std::thread([&] { error = error_of<std::logic_error>(work); }).join();
      EXPECT_EQ(error, "OSS on rank 0: a second thread calls " + call +
                           " while another thread is in step(); expected one thread at a time: guard the calls by a "
                           "mutex");
    };
    optimizer.step([&] {
      expect_refused("step()", [&] { optimizer.step(); });
      expect_refused("clip_grad_norm_()", [&] { optimizer.clip_grad_norm_(1); });
      expect_refused("consolidate_state_dict()", [&] { optimizer.consolidate_state_dict(); });
      parameter.mutable_grad() = torch::ones_like(parameter);
      optimizer.clip_grad_norm_(4);  // of this thread
      return torch::ones({});
    });
    expect_equal({parameter.detach().cpu()}, {torch::full({4}, 0.5)});
  });
}

TEST(PeakMemory, CountsWhatThisThreadHasAllocatedWhoeverFreesIt) {
  PeakMemory memory;
  const int64_t before = memory.current_bytes();
  {
    const auto a = torch::empty({1000});
    { const auto b = torch::empty({5000}); }
    EXPECT_EQ(memory.current_bytes() - before, 4000);
    EXPECT_EQ(memory.peak_bytes() - before, 24000);
    memory.reset();
    EXPECT_EQ(memory.peak_bytes(), memory.current_bytes());
    PeakMemory inner;
    at::Tensor given = torch::empty({700});
    std::thread([&] {
      PeakMemory of_another_thread;
      const auto there = torch::empty({10});
      EXPECT_EQ(of_another_thread.current_bytes(), 40);
      given.reset();
    }).join();
    EXPECT_EQ(inner.current_bytes() - before, 4000);
    EXPECT_EQ(inner.peak_bytes() - before, 6800);
    EXPECT_EQ(memory.peak_bytes() - before, 6800);
  }
  EXPECT_EQ(memory.current_bytes(), before);
}

}  // namespace
}  // namespace tessera::oss_test
