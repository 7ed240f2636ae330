// All stages against the unsharded loop: bit for bit, over random module trees and worlds.

#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::parity_test {
namespace {

using namespace testing_support;

int trees() { return trees_to_test(5); }

struct Data {
  at::Tensor x, y;
};

Data batch(int step, int rows) {
  return seeded(2000 + step, [&] { return Data{torch::randn({rows, kWidth}), torch::randn({rows, kWidth})}; });
}

ZeroOptions options(int stage, int kind) {
  ZeroOptions options;
  options.stage = stage;
  options.ddp.find_unused_parameters = true;
  options.ddp.gradient_as_bucket_view = kind % 2 == 0;
  options.ddp.bucket_cap_mb = kind % 3 == 0 ? 25 : 1e-4;
  options.ddp.first_bucket_mb = kind % 3 == 1 ? 1e-5 : 1;
  options.oss.broadcast_bucket_bytes = kind % 2 == 0 ? 1 << 24 : 300;
  options.sdp.reduce_buffer_size = kind % 3 == 0 ? 0 : kind % 3 == 1 ? 50 : 1 << 23;
  options.fsdp.auto_wrap = wrap_by_size(60);
  return options;
}

class Stages : public testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(WorldsAndStages, Stages,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5), testing::Values(0, 1, 2, 3)));

// Stages 0 and 1 keep averages on every rank, to which the next backward adds before it averages again:
// equal, but only to rounding.
class StagesWithShardedGradients : public Stages {};
INSTANTIATE_TEST_SUITE_P(WorldsAndStages, StagesWithShardedGradients,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5), testing::Values(2, 3)));

// How a step's gradients come together.
enum class Accumulation { kNone, kNoSync, kReduceEach };

template <class Model>
void train(Model& model, torch::optim::Optimizer& whole, RandomNet& reference, int kind, int world, int rank,
           Accumulation accumulation) {
  constexpr int kRows = 3, kSteps = 12;
  for (int step = 0; step < kSteps; ++step) {
    model.zero_grad(kind % 2 == 0);
    whole.zero_grad(kind % 2 == 0);
    const int passes = accumulation == Accumulation::kNone ? 1 : 2;
    std::vector<Data> parts;
    for (int pass = 0; pass < passes; ++pass) parts.push_back(batch(passes * step + pass, world * kRows));
    auto loss_of = [&](auto& net, const Data& data, int part) {
      return torch::mse_loss(net(data.x.narrow(0, part * kRows, kRows)), data.y.narrow(0, part * kRows, kRows));
    };
    for (int pass = 0; pass < passes; ++pass) {
      std::optional<Scope> alone;
      if (accumulation == Accumulation::kNoSync && pass == 0) alone.emplace(model.no_sync());
      const at::Tensor loss = loss_of(model, parts[pass], rank);
      if (loss.requires_grad()) loss.backward();
    }
    if (accumulation == Accumulation::kNoSync) {
      // The ranks' own sums are averaged: pass after pass in each part.
      reference_backward(reference, world, [&](int part) {
        const at::Tensor first = loss_of(reference, parts[0], part);
        if (first.requires_grad()) first.backward();
        return loss_of(reference, parts[1], part);
      });
    } else {
      for (const Data& data : parts)
        reference_backward(reference, world, [&](int part) { return loss_of(reference, data, part); });
    }
    model.step();
    whole.step();
  }
}

void expect_parity(int world, int stage, Accumulation accumulation, int count) {
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    for (int kind = 0; kind < count; ++kind) {
      auto build = [&](uint64_t seed) { return seeded(seed, [&] { return RandomNet(100 * world + kind); }); };
      auto reference = build(7);
      auto model = build(comm->rank() > 0 ? 8 : 7);  // rank 0's values count
      const std::string where = "stage " + std::to_string(stage) + " tree " + std::to_string(100 * world + kind);
      auto check = [&](auto&& wrapped, torch::optim::Optimizer& whole) {
        train(wrapped, whole, reference, kind, world, comm->rank(), accumulation);
        expect_same_parameters(wrapped, *reference, where);
      };
      const auto parameters = unique_parameters(*reference);
      if (kind % 2 == 0) {
        torch::optim::Adam whole(parameters, torch::optim::AdamOptions(1e-2));
        check(zero(model, torch::optim::AdamOptions(1e-2), comm, options(stage, kind)), whole);
      } else {
        const auto sgd = torch::optim::SGDOptions(1e-2).momentum(0.9);
        torch::optim::SGD whole(parameters, sgd);
        check(zero(model, sgd, comm, options(stage, kind)), whole);
      }
      if (testing::Test::HasFailure()) return;
    }
  });
}

TEST_P(Stages, RandomTreesTrainBitEqualToTheUnshardedLoop) {
  expect_parity(std::get<0>(GetParam()), std::get<1>(GetParam()), Accumulation::kNone, trees());
}
TEST_P(Stages, SumsMadeUnderNoSyncAreReducedWithTheLastBackward) {
  expect_parity(std::get<0>(GetParam()), std::get<1>(GetParam()), Accumulation::kNoSync, std::max(1, trees() / 3));
}
TEST_P(StagesWithShardedGradients, AddUpOverBackwardPasses) {
  expect_parity(std::get<0>(GetParam()), std::get<1>(GetParam()), Accumulation::kReduceEach, std::max(1, trees() / 3));
}

}  // namespace
}  // namespace tessera::parity_test
