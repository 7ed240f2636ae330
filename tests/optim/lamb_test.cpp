// LAMB: the formula, and equal results with and without sharding.
#include "tests/optim/given_gradients.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::lamb_test {
using namespace internal;
namespace {

using namespace testing_support;

TEST(Lamb, IsTheFormula) {
  auto weight = torch::tensor({3.0, 4.0}, at::kDouble).set_requires_grad(true);
  auto zero = torch::zeros({2}, at::kDouble).set_requires_grad(true);
  Lamb lamb({weight, zero}, torch::optim::AdamWOptions(0.1).weight_decay(0.5).eps(0));
  weight.mutable_grad() = torch::tensor({2.0, -7.0}, at::kDouble);
  zero.mutable_grad() = torch::tensor({2.0, -7.0}, at::kDouble);
  lamb.step();
  // The first Adam direction is the gradient's sign; plus decay: (2.5, 1). The norm of the weight is 5.
  const double trust = 5 / std::sqrt(2.5 * 2.5 + 1);
  EXPECT_TRUE(
      torch::allclose(weight.detach(), torch::tensor({3 - 0.1 * trust * 2.5, 4 - 0.1 * trust * 1.0}, at::kDouble)));
  EXPECT_TRUE(torch::allclose(zero.detach(), torch::tensor({-0.1, 0.1}, at::kDouble)));  // trust 1
}

class LambParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, LambParity, testing::Values(1, 2, 3, 4, 5));

TEST_P(LambParity, ShardedEqualsUnsharded) {
  const int world = GetParam();
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    for (unsigned kind = 0; kind < 2; ++kind) {
      auto build = [&] { return seeded(7, [&] { return RandomNet(30 + kind); }); };
      auto reference = build();
      FullyShardedDataParallel fsdp(build(), comm, {.auto_wrap = wrap_by_size(60)});
      const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
      Lamb sharded(fsdp, options), whole(unique_parameters(*reference), options);
      auto loss = [](auto& net, int rank) {
        return net(seeded(rank, [] { return torch::randn({4, testing_support::kWidth}); })).square().mean();
      };
      for (int step = 0; step < 6; ++step) {
        step_both(sharded, whole, [&] {
          at::Tensor own = loss(fsdp, comm->rank());
          if (own.requires_grad()) own.backward();
          reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
        });
      }
      auto state = fsdp.full_state_dict();
      for (const auto& entry : reference->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-4, 1e-5)) << entry.key();
    }
  });
}

// Replicas of a part count once. (Random trees have gradients of 0 up to rounding, whose direction depends on the order
// of additions.)
TEST(Lamb, WorksOnHybridShards) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    auto build = [] {
      return seeded(
          7, [] { return torch::nn::Sequential(torch::nn::Linear(8, 9), torch::nn::GELU(), torch::nn::Linear(9, 8)); });
    };
    auto reference = build();
    FullyShardedDataParallel fsdp(build(), comm, {.auto_wrap = wrap_by_size(60), .hybrid = {.ranks_per_copy = 2}});
    Lamb sharded(fsdp, torch::optim::AdamWOptions(1e-2)),
        whole(reference->parameters(), torch::optim::AdamWOptions(1e-2));
    auto loss = [](auto& net, int rank) {
      return call(net, seeded(rank, [] { return torch::randn({4, 8}); })).square().mean();
    };
    for (int step = 0; step < 6; ++step) {
      step_both(sharded, whole, [&] {
        loss(fsdp, comm->rank()).backward();
        reference_backward(reference, 4, [&](int rank) { return loss(reference, rank); });
      });
    }
    auto state = fsdp.full_state_dict();
    for (const auto& entry : reference->named_parameters())
      EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-4, 1e-5)) << entry.key();
  });
}

// zero() constructs it with the wrapper.
TEST(Lamb, IsExactThroughZero) {
  expect_exact_everywhere<Lamb>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1), 1e-5);
}

// One all-reduce a step, of two doubles a parameter.
TEST(Lamb, ExchangesTwoNumbersAParameter) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
    FullyShardedDataParallel fsdp(model, comm);
    Lamb lamb(fsdp);
    fsdp(torch::ones({1, 8})).sum().backward();
    const auto before = comm->traffic();
    lamb.step();
    EXPECT_EQ(comm->traffic().collectives - before.collectives, 1);
    EXPECT_EQ(comm->traffic().sent_bytes - before.sent_bytes, 2 * 4 * 8);
  });
}

TEST(Lamb, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    expect_contains(
        error_of<std::invalid_argument>([&] { Lamb lamb(fsdp, torch::optim::AdamWOptions(1e-2).amsgrad(true)); }),
        "amsgrad");
    expect_contains(error_of<std::invalid_argument>([&] {
                      Lamb lamb(fsdp, {torch::optim::OptimizerParamGroup({torch::ones({3}).set_requires_grad(true)})});
                    }),
                    "none of the wrapper's");
    expect_contains(error_of<std::invalid_argument>([&] { Lamb lamb(fsdp.parameters()); }), "is a shard of");
    for (const auto& [options, name] : {std::pair{torch::optim::AdamWOptions(-1.0), "learning rate"},
                                        std::pair{torch::optim::AdamWOptions(1.0).betas({0.9, 1.0}), "beta"},
                                        std::pair{torch::optim::AdamWOptions(1.0).eps(-1.0), "epsilon"},
                                        std::pair{torch::optim::AdamWOptions(1.0).weight_decay(NAN), "weight_decay"}})
      expect_contains(error_of<c10::Error>([&, &of = options] { Lamb lamb(fsdp, of); }), name);
  });
}

}  // namespace
}  // namespace tessera::lamb_test
