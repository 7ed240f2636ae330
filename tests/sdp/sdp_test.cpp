#include "core/layout/partition.h"
#include "optim/state/optimizer_state.h"
#include "tests/support/large_copies.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::sdp_test {
using namespace internal;
namespace {

using namespace testing_support;
using torch::optim::Adam;
using torch::optim::AdamOptions;

at::Tensor input(int seed) {
  return seeded(500 + seed, [] { return torch::randn({3, kWidth}); });
}

torch::nn::Sequential make_model(int64_t layers = 3) {
  return seeded(1, [&] {
    torch::nn::Sequential model;
    for (int64_t i = 0; i < layers; ++i) {
      model->push_back(torch::nn::Linear(kWidth, kWidth));
      model->push_back(torch::nn::Tanh());
    }
    return model;
  });
}

at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

TEST(Sdp, OwnersHaveDdpsGradientsBitForBitAndOthersNone) {
  for (int world : {2, 3, 4, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (int64_t buffer : {int64_t{0}, int64_t{160}, int64_t{1} << 25}) {
        auto model = make_model(), replica = make_model();
        OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-2), comm);
        ShardedDataParallel sdp(model, optimizer, comm, {.reduce_bucket_bytes = buffer});
        DistributedDataParallel ddp(replica, comm);
        for (int step = 0; step < 3; ++step) {
          sdp.zero_grad();
          ddp.zero_grad();
          loss_of(call(sdp, input(10 * step + comm->rank()))).backward();
          loss_of(call(ddp, input(10 * step + comm->rank()))).backward();
          const auto own = model->parameters(), whole = replica->parameters();
          for (size_t i = 0; i < own.size(); ++i) {
            ASSERT_EQ(own[i].grad().defined(), optimizer.owns(own[i])) << "parameter " << i;
            if (own[i].grad().defined()) {
              EXPECT_TRUE(same_values(own[i].grad(), whole[i].grad())) << "parameter " << i;
            }
          }
        }
      }
    });
  }
}

TEST(Sdp, GradientsThatOthersOwnAreFreedDuringBackward) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    constexpr int64_t kLayers = 12, kWide = 600, kLayerBytes = kWide * kWide * 4;
    torch::nn::Sequential model;
    for (int64_t i = 0; i < kLayers; ++i)
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
    on_rank_device(model);
    OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(1e-3), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      PeakMemory memory(comm->device());
      const int64_t before = memory.current_bytes();
      loss_of(call(sdp, on_rank_device(torch::ones({1, kWide})))).backward();
      // Half of the gradients stay. At most three of the others are in flight at a time, and as many
      // received ones of the peer.
      EXPECT_LE(memory.peak_bytes() - before, (kLayers / 2 + 8) * kLayerBytes);
      EXPECT_EQ(sdp.memory().grad_bytes, kLayers / 2 * kLayerBytes);
      EXPECT_LE(sdp.memory().peak_bucket_bytes, 4 * kLayerBytes);
      EXPECT_EQ(sdp.memory().bucket_bytes, 0);
      optimizer.step();
    }
  });
}

TEST(Sdp, AGradientThatNobodyElseHasTravelsWithoutACopy) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    static constexpr int64_t kWide = 600;
    torch::nn::Sequential model(torch::nn::Linear(kWide, kWide), torch::nn::Linear(kWide, kWide));
    OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(1e-3), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = loss_of(sdp(torch::ones({1, kWide})));
      EXPECT_EQ(large_copies(kWide * kWide, [&] { loss.backward(); }), 0) << "step " << step;
      optimizer.zero_grad();
    }
  });
}

// A large gradient is sent from autograd's memory, and the owner's own is added from there. One that a hook has kept is
// copied: a later write to it, which raises no version, has no effect, as in one process.
TEST(Sdp, AGradientThatIsOnItsWayIsNotWrittenTo) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    static constexpr int64_t kWide = 600;
    const auto build = [] {
      return seeded(
          1, [] { return torch::nn::Sequential(torch::nn::Linear(kWide, kWide), torch::nn::Linear(kWide, kWide)); });
    };
    auto model = build(), reference = build();
    OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(1e-3), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    at::Tensor kept;
    model[1]->as<torch::nn::Linear>()->weight.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
    model[0]->as<torch::nn::Linear>()->weight.register_hook([&](const at::Tensor&) { kept.data().mul_(2); });
    loss_of(sdp(torch::ones({1, kWide}))).backward();
    loss_of(reference->forward(torch::ones({1, kWide}))).backward();
    const auto own = model->parameters(), whole = reference->parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      if (optimizer.owns(own[i])) {
        EXPECT_TRUE(same_values(own[i].grad(), whole[i].grad())) << "parameter " << i;
      }
    }
  });
}

// Rank 0 owns the first parameter, rank 1 the others.
struct UsesTwoOfThree : torch::nn::Module {
  at::Tensor first = register_parameter("first", torch::ones({1 << 20}));
  at::Tensor second = register_parameter("second", torch::ones({1 << 19}));
  at::Tensor unused = register_parameter("unused", torch::ones({1 << 14}));
  at::Tensor forward(const at::Tensor& x) { return x * (first.sum() + second.sum()); }
};

TEST(Sdp, AGradientThatIsThereGetsNoSecondMemory) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto model = on_rank_device(std::make_shared<UsesTwoOfThree>());
    OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(1e-3), comm);
    ShardedDataParallel sdp(torch::nn::ModuleHolder<UsesTwoOfThree>(model), optimizer, comm);
    ASSERT_EQ(optimizer.owns(model->second), optimizer.owns(model->unused));
    PeakMemory memory(comm->device());
    int64_t after_first = 0;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      loss_of(call(sdp, on_rank_device(torch::ones({1})))).backward();
      if (step == 0) after_first = memory.current_bytes();
    }
    // After the first step sums are reduced in buckets, which are kept, and then added to the gradients.
    const auto bucket_bytes = static_cast<int64_t>(model->first.nbytes() + model->second.nbytes());
    EXPECT_LT(memory.current_bytes() - after_first, bucket_bytes + static_cast<int64_t>(model->second.nbytes()));
  });
}

TEST(Sdp, SendsEachGradientToItsOwnerOnceAndEachParameterBackOnce) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model;
    for (int64_t i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(300, 300).bias(false)));
    on_rank_device(model);
    OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-3), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    int64_t bytes = 0;
    for (int step = 0; step < 3; ++step) {
      const int64_t before = comm->traffic().sent_bytes;
      loss_of(call(sdp, on_rank_device(torch::ones({1, 300})))).backward();
      optimizer.step();
      bytes = comm->traffic().sent_bytes - before;
    }
    const int64_t model_bytes = 8 * 300 * 300 * 4;
    EXPECT_GE(bytes, model_bytes);  // half as gradients, half as parameters, of two ranks
    EXPECT_LE(bytes, model_bytes + 1000);
  });
}

TEST(Sdp, SeveralOptimizersShareAModel) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = make_model(), reference = make_model();
    auto split = [](torch::nn::Sequential& net) {
      auto all = net->parameters();
      return std::make_pair(std::vector<at::Tensor>(all.begin(), all.begin() + 2),
                            std::vector<at::Tensor>(all.begin() + 2, all.end()));
    };
    auto [first, rest] = split(model);
    auto [reference_first, reference_rest] = split(reference);
    OSS<Adam> adam(first, AdamOptions(1e-2), comm);
    OSS<torch::optim::SGD> sgd(rest, torch::optim::SGDOptions(0.1), comm);
    ShardedDataParallel sdp(model, {&adam, &sgd}, comm);
    Adam whole_adam(reference_first, AdamOptions(1e-2));
    torch::optim::SGD whole_sgd(reference_rest, torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      sdp.zero_grad();
      reference->zero_grad();
      loss_of(call(sdp, input(10 * step + comm->rank()))).backward();
      reference_backward(reference, 3, [&](int part) { return loss_of(reference->forward(input(10 * step + part))); });
      adam.step();
      sgd.step();
      whole_adam.step();
      whole_sgd.step();
    }
    expect_same_parameters(sdp, *reference, "two optimizers");
  });
}

TEST(Sdp, ChangesOfRequiresGradAreNoticed) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = make_model(), reference = make_model();
    for (auto* net : {&model, &reference}) (*net)->parameters()[2].set_requires_grad(false);
    OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-2), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    Adam whole(reference->parameters(), AdamOptions(1e-2));
    for (int step = 0; step < 6; ++step) {
      for (auto* net : {&model, &reference}) {
        (*net)->parameters()[2].set_requires_grad(step >= 2);
        (*net)->parameters()[0].set_requires_grad(step != 3);
      }
      optimizer.zero_grad();
      whole.zero_grad();
      loss_of(call(sdp, input(10 * step + comm->rank()))).backward();
      reference_backward(reference, 3, [&](int part) { return loss_of(reference->forward(input(10 * step + part))); });
      optimizer.step();
      whole.step();
    }
    expect_same_parameters(sdp, *reference, "frozen and thawed");
  });
}

TEST(Sdp, UnusedOnSomeRanksCountsAsZeroAndUnusedOnAllKeepsNone) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    torch::nn::ModuleList heads(torch::nn::Linear(kWidth, 2), torch::nn::Linear(kWidth, 2),
                                torch::nn::Linear(kWidth, 2));
    struct Switch : torch::nn::Module {
      explicit Switch(torch::nn::ModuleList list) : heads(register_module("heads", list)) {}
      at::Tensor forward(const at::Tensor& x, int64_t head) { return heads[head]->as<torch::nn::Linear>()->forward(x); }
      torch::nn::ModuleList heads;
    };
    auto model = on_rank_device(std::make_shared<Switch>(heads));
    OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(1.0), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      sdp(on_rank_device(torch::ones({1, kWidth})), comm->rank() == 2 ? 1 : 0).sum().backward();
      for (int64_t head = 0; head < 3; ++head) {
        const auto& bias = heads[head]->as<torch::nn::Linear>()->bias;
        ASSERT_EQ(bias.grad().defined(), optimizer.owns(bias) && head != 2) << "head " << head;
        if (bias.grad().defined()) {
          EXPECT_TRUE(torch::allclose(bias.grad().cpu(), torch::full({2}, head == 0 ? 2.0f / 3 : 1.0f / 3)));
        }
      }
    }
  });
}

TEST(Sdp, ReduceInSixteenBitsHalvesTheBytesAndAgreesToRounding) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = make_model(), replica = make_model();
    OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-2), comm);
    ShardedDataParallel sdp(model, optimizer, comm, {.reduce_dtype = torch::kBFloat16});
    DistributedDataParallel ddp(replica, comm);
    loss_of(call(sdp, input(comm->rank()))).backward();
    loss_of(call(ddp, input(comm->rank()))).backward();
    const auto own = model->parameters(), whole = replica->parameters();
    for (size_t i = 0; i < own.size(); ++i)
      if (own[i].grad().defined()) {
        EXPECT_EQ(own[i].grad().scalar_type(), torch::kFloat);
        EXPECT_TRUE(torch::allclose(own[i].grad(), whole[i].grad(), 1e-2, 1e-4));
      }
  });
}

TEST(Sdp, ClippingEqualsTheUnshardedOne) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto model = make_model(), replica = make_model();
    OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-2), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    DistributedDataParallel ddp(replica, comm);
    for (int round = 0; round < 2; ++round) {
      sdp.zero_grad();
      ddp.zero_grad();
      loss_of(call(sdp, input(comm->rank()))).backward();
      loss_of(call(ddp, input(comm->rank()))).backward();
      const double norm = round == 0 ? sdp.clip_grad_norm_(1e-3) : optimizer.clip_grad_norm_(1e-3);
      EXPECT_NEAR(norm, ddp.clip_grad_norm_(1e-3), 1e-6);
      const auto own = model->parameters(), whole = replica->parameters();
      for (size_t i = 0; i < own.size(); ++i)
        if (own[i].grad().defined()) {
          EXPECT_TRUE(torch::allclose(own[i].grad(), whole[i].grad(), 1e-4, 1e-9));
        }
    }
  });
}

TEST(Sdp, AverageThenOwnSumsThenAverageIsTheSumOfAll) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto linear = on_rank_device(torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
    OSS<torch::optim::SGD> optimizer(linear->parameters(), torch::optim::SGDOptions(1.0), comm);
    ShardedDataParallel sdp(linear, optimizer, comm);
    const auto pass = [&](float value) {
      sdp(on_rank_device(torch::full({1, 4}, value + static_cast<float>(comm->rank())))).sum().backward();
    };
    pass(1);  // averages 1.5
    {
      auto alone = sdp.no_sync();
      pass(10);  // 10.5
      EXPECT_TRUE(linear->weight.grad().defined());
    }
    pass(100);  // 100.5
    if (optimizer.owns(linear->weight)) {
      EXPECT_TRUE(torch::equal(linear->weight.grad().cpu(), torch::full({1, 4}, 112.5f)));
    } else {
      EXPECT_FALSE(linear->weight.grad().defined());
    }
    optimizer.zero_grad();
    pass(1);
    if (optimizer.owns(linear->weight)) {
      EXPECT_TRUE(torch::equal(linear->weight.grad().cpu(), torch::full({1, 4}, 1.5f)));
    }
  });
}

TEST(SdpMistakes, AreClear) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = make_model();
    OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-2), comm);
    auto other = make_model();
    expect_contains(error_of<std::invalid_argument>([&] { ShardedDataParallel bad(other, optimizer, comm); }),
                    "parameter '0.weight' requires a gradient but is in none of the optimizers");
    OSS<Adam> twice(model->parameters(), AdamOptions(1e-2), comm);
    expect_contains(
        error_of<std::invalid_argument>([&] { ShardedDataParallel bad(model, {&optimizer, &twice}, comm); }),
        "is in two of the optimizers");
    EXPECT_THROW(ShardedDataParallel(model, optimizer, comm, {.reduce_bucket_bytes = -1}), std::invalid_argument);
    expect_contains(error_of<std::invalid_argument>(
                        [&] { ShardedDataParallel bad(model, optimizer, comm, {.reduce_dtype = at::kFloat8_e4m3fn}); }),
                    "SdpOptions::reduce_dtype is Float8_e4m3fn, expected Half, BFloat16, Float or Double");

    ShardedDataParallel sdp(model, optimizer, comm);
    const auto before = model->parameters()[0].detach().clone();
    {
      auto alone = sdp.no_sync();
      loss_of(call(sdp, input(1))).backward();
    }
    expect_contains(error_of<std::logic_error>([&] { optimizer.step(); }),
                    "is this rank's own sum, made under no_sync()");
    EXPECT_TRUE(torch::equal(model->parameters()[0].detach(), before));
    optimizer.zero_grad();
    optimizer.step();  // without a gradient nothing moves
    EXPECT_TRUE(torch::equal(model->parameters()[0].detach(), before));

    at::Tensor y = call(sdp, input(1));
    y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook of the user's fails"); });
    EXPECT_ANY_THROW(loss_of(y).backward());
    expect_contains(error_of<std::logic_error>([&] { optimizer.step(); }), "after a backward pass that failed");
    optimizer.zero_grad();
    loss_of(call(sdp, input(1))).backward();
    optimizer.step();
    at::Tensor z = loss_of(call(sdp, input(1)));
    EXPECT_THROW(z.backward({}, std::nullopt, /*create_graph=*/true), std::logic_error);
  });
}

// The base class's add_param_group() is not virtual. OSS takes the group over in its next collective method.
TEST(SdpMistakes, AGroupThatTheBaseClassHasAddedIsTakenOrNamed) {
  for (const bool is_taken : {true, false}) {
    on_ranks(2, [is_taken](std::shared_ptr<Communicator> comm) {
      auto model = make_model(2);
      const auto all = model->parameters();
      const std::vector<at::Tensor> first(all.begin(), all.begin() + 2), rest(all.begin() + 2, all.end());
      for (const at::Tensor& parameter : first) parameter.set_requires_grad(false);
      OSS<Adam> optimizer(rest, AdamOptions(1e-2), comm);
      ShardedDataParallel sdp(model, optimizer, comm);
      loss_of(call(sdp, input(1))).backward();
      for (const at::Tensor& parameter : first) parameter.set_requires_grad(true);
      static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(torch::optim::OptimizerParamGroup(first));
      if (is_taken) {
        EXPECT_GT(optimizer.clip_grad_norm_(1.0), 0);
        EXPECT_GE(optimizer.owner(first[0]), 0);
        loss_of(call(sdp, input(2))).backward();
        optimizer.step();
        EXPECT_EQ(first[0].grad().defined(), optimizer.owns(first[0]));
        return;
      }
      const std::string expected =
          " of group 1 on rank " + std::to_string(comm->rank()) + " was added by add_param_group() of the base class";
      const OptimizerStateDict dict = describe_groups(optimizer);
      expect_contains(error_of<std::logic_error>([&] { optimizer.load_state_dict(dict); }), expected);
      expect_contains(error_of<std::logic_error>([&] { call(sdp, input(2)); }), expected);
      optimizer.consolidate_state_dict();
      optimizer.load_state_dict(dict);
      loss_of(call(sdp, input(2))).backward();  // the refused forward had no effect
      optimizer.step();
      EXPECT_EQ(first[0].grad().defined(), optimizer.owns(first[0]));
    });
  }
}

TEST(Sdp, ARankThatSkipsALayerOrDiesIsNamed) {
  const std::string text = error_of<std::exception>([] {
    on_ranks(3, [](std::shared_ptr<Communicator> comm) {
      auto model = make_model();
      OSS<Adam> optimizer(model->parameters(), AdamOptions(1e-2), comm);
      ShardedDataParallel sdp(model, optimizer, comm);
      loss_of(call(sdp, input(1))).backward();
      if (comm->rank() == 2) throw std::runtime_error("rank 2 is out of memory");
      optimizer.step();
    });
  });
  expect_contains(text, "rank 2 is out of memory");
}

}  // namespace
}  // namespace tessera::sdp_test
