// Secondary shards: the same bits as without, and fewer bytes between distant ranks.
#include "tests/fsdp/linear_chain.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::secondary_test {
using namespace internal;
namespace {

using namespace testing_support;

FsdpOptions with_secondary(int ranks, int ranks_per_copy = 0) {
  return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
          .hybrid = {.ranks_per_copy = ranks_per_copy, .ranks_per_secondary_copy = ranks}};
}

// Steps with an evaluation and accumulated batches, and a write to the shards between two batches.
torch::OrderedDict<std::string, at::Tensor> train(std::shared_ptr<Communicator> comm, const FsdpOptions& options,
                                                  unsigned kind) {
  FullyShardedDataParallel fsdp(seeded(7, [&] { return RandomNet(kind); }), comm, options);
  torch::optim::SGD optimizer(fsdp.parameters(), 0.05);
  auto loss = [&](int seed) { return fsdp(input(comm->rank() + seed, kWidth)).square().mean(); };
  auto backward = [&](int seed) {
    at::Tensor value = loss(seed);
    if (value.requires_grad()) value.backward();
  };
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    {
      auto scope = fsdp.no_sync();
      backward(10 * step);
      if (step == 2) {
        // In place, without autograd, while secondary shards have the old values.
        for (at::Tensor& shard : fsdp.parameters()) shard.data().mul_(0.9);
      }
      backward(10 * step + 1);
    }
    {
      torch::NoGradGuard no_grad;
      loss(100);
    }
    backward(10 * step + 2);
    loss(101);  // recorded, without a backward
    fsdp.clip_grad_norm_(0.5);
    optimizer.step();
  }
  EXPECT_EQ(fsdp.memory().staging_bytes, 0);
  return fsdp.full_state_dict();
}

struct Case {
  int world, secondary, copy = 0;
};

TEST(SecondaryCopies, TrainToTheSameBits) {
  const std::vector<Case> all{{2, 1}, {3, 1}, {4, 2}, {4, 1}, {5, 1}, {6, 3}, {6, 2}, {8, 2, 4}},
      of_four_devices{{4, 2}};
  for (const Case& at : run_ranks_on_devices != nullptr ? of_four_devices : all) {
    on_ranks(at.world, [&](std::shared_ptr<Communicator> comm) {
      for (unsigned kind = 700; kind < 700u + trees_to_test(fewer_on_devices(2, 1)); ++kind) {
        const auto expected = train(comm, with_secondary(0, at.copy), kind);
        const auto state = train(comm, with_secondary(at.secondary, at.copy), kind);
        for (const auto& entry : expected)
          EXPECT_TRUE(same_values(state[entry.key()], entry.value()))
              << at.world << " ranks, secondary copies of " << at.secondary << ", " << kind << ": " << entry.key();
      }
    });
  }
}

TEST(SecondaryCopies, WithOffloadPrecisionAndWireFormatsToo) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    auto compare = [&](const std::string& what, const std::function<void(FsdpOptions&)>& set) {
      FsdpOptions without = with_secondary(0), with = with_secondary(2);
      set(without);
      set(with);
      const auto expected = train(comm, without, 701), state = train(comm, with, 701);
      for (const auto& entry : expected)
        EXPECT_TRUE(same_values(state[entry.key()], entry.value())) << what << entry.key();
    };
    compare("offload: ", [](FsdpOptions& options) { options.offload = {.params = true, .grads = true}; });
    compare("bf16: ", [](FsdpOptions& options) {
      options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    });
    compare("int8: ", [](FsdpOptions& options) { options.wire.parameters = WireFormat::kInt8Blocks; });
    compare("ahead: ", [](FsdpOptions& options) { options.prefetch = 3; });
    compare("alone: ", [](FsdpOptions& options) {
      options.prefetch = 0;
      options.keep_recent = 1;
    });
  });
}

// Of 4 ranks: forward receives 3/4 of the model from three peers, backward 1/2 from one.
TEST(SecondaryCopies, BackwardGathersFromTheRanksThatAreNear) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    constexpr int kDepth = 4;
    constexpr int64_t kWidth = 64, kUnitBytes = (kWidth * kWidth + kWidth) * 4;
    FsdpOptions options = with_secondary(2);
    options.prefetch = 0;
    options.keep_recent = 1;
    FullyShardedDataParallel fsdp(chain(kDepth, kWidth), comm, options);
    auto sent = [&](const std::function<void()>& what) {
      const auto before = comm->traffic().sent_bytes;
      what();
      return comm->traffic().sent_bytes - before;
    };
    at::Tensor loss;
    auto forward = [&] { loss = fsdp(input(comm->rank(), kWidth)).sum(); };
    // To each peer: the fingerprint of the order twice, a flag for each parameter and bucket.
    constexpr int64_t kReduced = kDepth * kUnitBytes * 3 / 4, kReport = 3 * (2 + 2 * kDepth + kDepth) * 8;
    // The last unit is still unsharded when backward begins, and backward does not use the first one, since its input
    // needs no gradient.
    constexpr int64_t kNear = (kDepth - 2) * kUnitBytes / 2;
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(sent(forward), kDepth * kUnitBytes * 3 / 4);
      EXPECT_EQ(fsdp.memory().secondary_bytes, (kDepth - 1) * kUnitBytes / 2);
      EXPECT_EQ(sent([&] { loss.backward(); }), kNear + kReduced + kReport);
      EXPECT_EQ(fsdp.memory().secondary_bytes, 0);
      EXPECT_EQ(fsdp.memory().peak_secondary_bytes, (kDepth - 1) * kUnitBytes / 2);
    }
    // Accumulated batches gather from all ranks once.
    {
      auto scope = fsdp.no_sync();
      EXPECT_EQ(sent(forward), kDepth * kUnitBytes * 3 / 4);
      EXPECT_EQ(sent([&] { loss.backward(); }), kNear);
      EXPECT_EQ(sent(forward), kDepth * kUnitBytes / 2);
      EXPECT_EQ(sent([&] { loss.backward(); }), kNear);
    }
    EXPECT_EQ(sent(forward), kDepth * kUnitBytes / 2);
    loss.backward();
    EXPECT_EQ(fsdp.memory().secondary_bytes, 0);
    EXPECT_EQ(sent(forward), kDepth * kUnitBytes * 3 / 4);
    // An evaluation keeps no secondary shard.
    loss.backward();
    torch::NoGradGuard no_grad;
    forward();
    EXPECT_EQ(fsdp.memory().secondary_bytes, 0);
  });
}

TEST(SecondaryCopies, OfAllRanksAreNoneAndOthersMustDivide) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    auto refusal = [&](const FsdpOptions& options) {
      return error_of<std::invalid_argument>([&] { FullyShardedDataParallel fsdp(chain(1, 4), comm, options); });
    };
    expect_contains(refusal(with_secondary(3)), "ranks_per_secondary_copy is 3, expected a divisor of the number of");
    expect_contains(refusal(with_secondary(4, 2)), "ranks that share a copy, 2, or 0");
    expect_contains(refusal(with_secondary(-1)), "ranks_per_secondary_copy is -1");
    expect_contains(refusal(with_secondary(comm->rank() == 2 ? 2 : 1)), "ranks_per_secondary_copy=");
    FsdpOptions keeps = with_secondary(2);
    keeps.reshard_after_forward = false;
    expect_contains(refusal(keeps), "backward gathers nothing, expected 0");
    FullyShardedDataParallel all(chain(2, 4), comm, with_secondary(4)), two(chain(2, 4), comm, with_secondary(2));
    EXPECT_EQ(all.describe().find("gathered again"), std::string::npos);
    expect_contains(two.describe(), "over 4 ranks, gathered again from 2");
  });
}

}  // namespace
}  // namespace tessera::secondary_test
