// Hybrid sharding: copies of the model, each sharded over some of the ranks.
#include "tests/fsdp/linear_chain.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::hybrid_test {
using namespace internal;
namespace {

using namespace testing_support;

FsdpOptions hybrid(int ranks_per_copy) {
  return {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .hybrid = {.ranks_per_copy = ranks_per_copy}};
}

TEST(Hybrid, TrainsAsTheUnshardedLoop) {
  const std::vector<std::pair<int, int>> all{{2, 1}, {2, 2}, {4, 2}, {4, 1}, {6, 3}, {6, 2}}, of_four_devices{{4, 2}};
  for (auto [world, per_copy] : run_ranks_on_devices != nullptr ? of_four_devices : all) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (int kind = 0; kind < fewer_on_devices(3, 1); ++kind) {
        auto build = [&](uint64_t seed) { return seeded(seed, [&] { return RandomNet(700 + kind); }); };
        auto reference = build(7);
        FullyShardedDataParallel fsdp(build(comm->rank() == 0 ? 7 : 8), comm, hybrid(per_copy));
        const std::string where = std::to_string(world) + " ranks, " + std::to_string(per_copy) + " a copy: ";
        expect_same_parameters(fsdp, *reference, where);
        torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(unique_parameters(*reference), 0.1);
        auto loss = [&](auto& net, int rank) { return call(net, input(rank, kWidth)).square().mean(); };
        for (int step = 0; step < 5; ++step) {
          step_both(sharded, whole, [&] {
            at::Tensor own = loss(fsdp, comm->rank());
            if (own.requires_grad()) own.backward();
            reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
            const double norm = fsdp.clip_grad_norm_(0.5);
            const double expected = torch::nn::utils::clip_grad_norm_(unique_parameters(*reference), 0.5);
            EXPECT_NEAR(norm, expected, 1e-4 * expected) << where;
          });
        }
        auto state = fsdp.full_state_dict();
        for (const auto& entry : reference->named_parameters())
          EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-4, 1e-5)) << where << entry.key();
        // Every copy has the same bits.
        for (const auto& entry : reference->named_parameters()) {
          at::Tensor least = state[entry.key()].clone(at::MemoryFormat::Contiguous), most = least.clone();
          comm->all_reduce(least, ReduceOp::kMin).wait();
          comm->all_reduce(most, ReduceOp::kMax).wait();
          EXPECT_TRUE(torch::equal(least, most)) << where << entry.key();
        }
        if (testing::Test::HasFailure()) return;
      }
    });
  }
}

TEST(Hybrid, ShardsSayWhoHasTheSamePart) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(chain(1, 8), comm, hybrid(2));
    for (const NamedShard& shard : fsdp.named_shards()) {
      EXPECT_EQ(shard.replica, comm->rank() / 2);
      EXPECT_EQ(shard.replica_count, 2);
    }
    EXPECT_EQ(fsdp.memory().shard_bytes, (8 * 8 + 8) * 4 / 2);
    expect_contains(fsdp.describe(), "over 2 ranks, 2 copies");
  });
}

// Gathers and reduce-scatters stay within a copy of two ranks; a shard of the gradient crosses between copies.
TEST(Hybrid, BytesAreThoseOfTheSmallerGroups) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    constexpr int64_t kModelBytes = 256 * 256 * 4;
    auto sent = [&](int ranks_per_copy) {
      FsdpOptions options = hybrid(ranks_per_copy);
      options.reshard_after_forward = false;
      auto model = torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false));
      FullyShardedDataParallel fsdp(model, comm, options);
      const auto start = comm->traffic().sent_bytes;
      auto loss = fsdp(torch::ones({1, 256})).sum();
      const auto gathered = comm->traffic().sent_bytes - start;
      loss.backward();
      return std::pair{gathered, comm->traffic().sent_bytes - start - gathered};
    };
    // To each peer: the fingerprint of the order twice, a flag for the parameter and one for its bucket.
    constexpr int64_t kReport = 3 * 4 * 8;
    EXPECT_EQ(sent(0), (std::pair{3 * kModelBytes / 4, 3 * kModelBytes / 4 + kReport}));
    // Half the model to the other rank, then half the gradient, and an all-reduce of that half over two ranks.
    EXPECT_EQ(sent(2), (std::pair{kModelBytes / 2, kModelBytes / 2 + kModelBytes / 2 + kReport}));
  });
}

// Each copy gathers alone, so a copy that diverges stalls no other. The fingerprints of the next backward differ, and
// all ranks throw.
TEST(Hybrid, CopiesThatDivergeAreNamed) {
  on_ranks(4, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(chain(3, 8), comm, hybrid(2));
    fsdp(input(0, 8)).sum().backward();
    if (comm->rank() >= 2) {
      torch::NoGradGuard no_grad;
      fsdp(input(0, 8));
    }
    const std::string error = error_of<std::invalid_argument>([&] { fsdp(input(0, 8)).sum().backward(); });
    expect_contains(error, "what was gathered and reduced since the last backward: rank 0 has 'forward of the model'");
    expect_contains(error, "rank 2 has 'all-gather of unit ");
    fsdp.zero_grad();
    fsdp(input(0, 8)).sum().backward();  // the copies agree again
  });
}

TEST(Hybrid, RanksThatDoNotDivideAreRefused) {
  on_ranks(3, [](std::shared_ptr<Communicator> comm) {
    expect_contains(
        error_of<std::invalid_argument>([&] { FullyShardedDataParallel fsdp(chain(1, 4), comm, hybrid(2)); }),
        "ranks_per_copy is 2");
    expect_contains(error_of<std::invalid_argument>(
                        [&] { FullyShardedDataParallel fsdp(chain(1, 4), comm, hybrid(comm->rank() == 1 ? 3 : 1)); }),
                    "ranks_per_copy=3");
  });
}

}  // namespace
}  // namespace tessera::hybrid_test
