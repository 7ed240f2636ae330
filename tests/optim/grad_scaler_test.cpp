// Loss scaling: one rank's overflow affects all.
#include "tests/support/reference.h"

namespace tessera::grad_scaler_test {
using namespace internal;
namespace {

using namespace testing_support;

TEST(GradScaler, TrainsAsWithoutScaling) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    std::vector<at::Tensor> results;
    for (const bool scaled : {false, true}) {
      auto model = seeded(1, [] { return torch::nn::Linear(8, 8); });
      FullyShardedDataParallel fsdp(model, comm);
      torch::optim::SGD sgd(fsdp.parameters(), 0.1);
      ShardedGradScaler scaler(comm, {.initial_scale = 1024, .growth_interval = 2});
      for (int step = 0; step < 4; ++step) {
        sgd.zero_grad();
        at::Tensor loss = fsdp(seeded(comm->rank(), [] { return torch::randn({4, 8}); })).square().mean();
        if (scaled) {
          scaler.scale(loss).backward();
          if (step % 2 == 1) scaler.unscale_(sgd);
          if (step % 2 == 1) fsdp.clip_grad_norm_(0.1);
          EXPECT_TRUE(scaler.step(sgd));
          scaler.update();
        } else {
          loss.backward();
          if (step % 2 == 1) fsdp.clip_grad_norm_(0.1);
          sgd.step();
        }
      }
      EXPECT_EQ(scaler.get_scale(), scaled ? 4096 : 1024);  // it grew twice
      results.push_back(fsdp.full_state_dict()["weight"]);
    }
    EXPECT_TRUE(torch::allclose(results[0], results[1], 1e-6, 1e-7));
  });
}

TEST(GradScaler, UnscalesGradientsOfNegativesOfTheirMemory) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto weight = torch::ones({3}).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, 1.0);
    ShardedGradScaler scaler(comm, {.initial_scale = 8});
    weight.mutable_grad() = at::_neg_view(torch::full({3}, 8.0));
    EXPECT_TRUE(scaler.step(sgd));
    EXPECT_TRUE(torch::equal(weight, torch::full({3}, 2.0)));
  });
}

// module->parameters() has a tied parameter under each of its names; OSS steps it once.
TEST(GradScaler, UnscalesAParameterThatIsListedTwiceOnce) {
  for (int world : {1, 2}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      auto weight = torch::ones({3}).set_requires_grad(true);
      OSS<torch::optim::SGD> sgd(std::vector<at::Tensor>{weight, weight}, torch::optim::SGDOptions(1.0), comm);
      ShardedGradScaler scaler(comm, {.initial_scale = 8});
      weight.mutable_grad() = torch::full({3}, 8.0);
      EXPECT_TRUE(scaler.step(sgd));
      EXPECT_TRUE(torch::equal(weight, torch::zeros({3})));
    });
  }
}

// The overflow is in a part of the gradient that only one rank holds.
TEST(GradScaler, AllRanksLeaveAStepOutTogether) {
  for (int world : {1, 2, 3}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      auto model = seeded(1, [] { return torch::nn::Linear(8, 8); });
      FullyShardedDataParallel fsdp(model, comm);
      Adam adam(fsdp.parameters(), 0.1);
      ShardedGradScaler scaler(comm, {.initial_scale = 8});
      auto bias = fsdp.named_parameters()["bias"];
      const at::Tensor before = fsdp.full_state_dict()["weight"];
      fsdp(torch::ones({1, 8})).sum().backward();
      if (bias.numel() > 0) bias.mutable_grad()[0] = INFINITY;
      EXPECT_FALSE(scaler.step(adam));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 4);
      EXPECT_TRUE(torch::equal(fsdp.full_state_dict()["weight"], before));
      EXPECT_TRUE(adam.state().empty());
      adam.zero_grad();
      scaler.scale(fsdp(torch::ones({1, 8})).sum()).backward();
      EXPECT_TRUE(scaler.step(adam));
      scaler.update();
      EXPECT_FALSE(torch::equal(fsdp.full_state_dict()["weight"], before));
    });
  }
}

// A loss of 2^-20: its fp16 gradients vanish without scaling.
TEST(GradScaler, SavesSmallGradientsInHalf) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (const bool scaled : {false, true}) {
      auto model = seeded(1, [] { return torch::nn::Linear(8, 8); });
      FullyShardedDataParallel fsdp(model, comm, {.mixed_precision = {.param_dtype = at::kHalf}});
      torch::optim::SGD sgd(fsdp.parameters(), 1.0);
      ShardedGradScaler scaler(comm, {.initial_scale = scaled ? 65536.0 : 1.0});
      auto loss = fsdp(torch::ones({1, 8})).to(at::kFloat).sum() * std::pow(2.0, -26);
      scaler.scale(loss).backward();
      scaler.unscale_(sgd);
      const double norm = fsdp.clip_grad_norm_(1e9);
      EXPECT_NEAR(norm, scaled ? std::sqrt(72.0) * std::pow(2.0, -26) : 0.0, 1e-10);
    }
  });
}

// Small losses raise the scale without end, and NaN in every step lowers it (pytorch#98828).
TEST(GradScaler, KeepsAScaleThatFp32CanMultiplyAndDivideBy) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto weight = torch::ones({1}).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, 1.0);
    auto train = [&](ShardedGradScaler& scaler, double slope) {
      sgd.zero_grad();
      scaler.scale((weight * slope).sum()).backward();
      const bool steps = scaler.step(sgd);
      scaler.update();
      return steps;
    };
    ShardedGradScaler grows(comm, {.initial_scale = 0x1p120, .growth_interval = 1});
    for (int step = 0; step < 20; ++step) EXPECT_TRUE(train(grows, 0x1p-30)) << step;
    EXPECT_EQ(grows.get_scale(), 0x1p127);
    EXPECT_EQ(weight.item<float>(), 1 - 20 * 0x1p-30F);
    ShardedGradScaler falls(comm, {.initial_scale = 0x1p-120});
    for (int step = 0; step < 20; ++step) EXPECT_FALSE(train(falls, NAN)) << step;
    EXPECT_EQ(falls.get_scale(), 0x1p-127);
    EXPECT_TRUE(train(falls, 0x1p20));
    EXPECT_EQ(weight.item<float>(), 1 - 0x1p20F);
    for (const double scale : {double{INFINITY}, 0x1p128, 0x1p-130, double{NAN}}) {
      EXPECT_THROW(ShardedGradScaler(comm, {.initial_scale = scale}), std::invalid_argument) << scale;
      EXPECT_THROW(grows.load_state({.scale = scale}), std::invalid_argument) << scale;
    }
  });
}

TEST(GradScaler, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto weight = torch::ones({1}).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, 0.1);
    ShardedGradScaler scaler(comm);
    EXPECT_THROW(scaler.update(), std::logic_error);
    scaler.unscale_(sgd);
    EXPECT_THROW(scaler.unscale_(sgd), std::logic_error);
    scaler.step(sgd);
    EXPECT_THROW(scaler.step(sgd), std::logic_error);
    expect_contains(error_of<std::invalid_argument>([&] { ShardedGradScaler other(comm, {.backoff_factor = 1}); }),
                    "backoff_factor");
    EXPECT_THROW(ShardedGradScaler(nullptr), std::invalid_argument);
    EXPECT_THROW(scaler.load_state({.scale = 2, .finite_steps = -5}), std::invalid_argument);
    scaler.load_state({.scale = 2, .finite_steps = 5});
    EXPECT_EQ(scaler.get_scale(), 2);
    EXPECT_EQ(scaler.state().finite_steps, 5);
  });
}

TEST(GradScaler, RanksOfOtherScalesHaveDiverged) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto weight = torch::ones({1}).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, 0.1);
    ShardedGradScaler scaler(comm, {.initial_scale = comm->rank() == 0 ? 1024.0 : 512.0});
    scaler.scale(weight.sum()).backward();
    expect_contains(error_of<CommError>([&] { scaler.step(sgd); }), "whether gradients scaled by");
    EXPECT_FALSE(scaler.step(sgd));  // the gradients may be infinite
    EXPECT_EQ(weight.item<float>(), 1);
  });
}

}  // namespace
}  // namespace tessera::grad_scaler_test
