// All stages against the unsharded loop, bit for bit, over random module trees and worlds.

#include <cstdlib>
#include <map>
#include <tuple>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::parity_test {
using namespace internal;
namespace {

using namespace testing_support;

// Selects two of five pairs of trees and options for each world and stage; each stage tests all of them.
std::vector<int> kinds_at(int world, int stage) {
  if (has_full_matrix()) return {0, 1, 2, 3, 4};
  return {(world + stage) % 5, (world + stage + 2) % 5};
}
std::vector<int> one_kind_at(int world, int stage) {
  if (has_full_matrix()) return kinds_at(world, stage);
  return {(world + 2 * stage) % 5};
}

constexpr int kRows = 3;  // of each rank

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
  options.ddp.bucket_bytes = kind % 3 == 0 ? 25 << 20 : 105;
  options.ddp.first_bucket_bytes = kind % 3 == 1 ? 10 : 1 << 20;
  options.oss.broadcast_bucket_bytes = kind % 2 == 0 ? 1 << 24 : 300;
  options.sdp.reduce_bucket_bytes = kind % 3 == 0 ? 0 : kind % 3 == 1 ? 200 : 1 << 25;
  options.fsdp.auto_wrap = wrap_by_size(60);
  return options;
}

// With sanitizers two worlds suffice to find races, and each takes five times as long.
std::vector<int> worlds() {
  return std::getenv("TESSERA_TEST_TREES") != nullptr ? std::vector{1, 3} : std::vector{1, 2, 3, 4, 5};
}

class Stages : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(WorldsAndStages, Stages,
                         ::testing::Combine(::testing::ValuesIn(worlds()), ::testing::Values(0, 1, 2, 3)));

// Stages 0 and 1 keep averages on every rank; the next backward adds to them before it averages again. Results are
// equal only to rounding.
class StagesWithShardedGradients : public Stages {};
INSTANTIATE_TEST_SUITE_P(WorldsAndStages, StagesWithShardedGradients,
                         ::testing::Combine(::testing::ValuesIn(worlds()), ::testing::Values(2, 3)));

// How the gradients of a step are accumulated.
enum class Accumulation { kNone, kNoSync, kReduceEach };

// Runs the steps of both sides of the comparison. `backward` computes a step's gradients.
template <class Backward>
void train(int kind, int world, Accumulation accumulation, Backward backward) {
  constexpr int kSteps = 12;
  const int passes = accumulation == Accumulation::kNone ? 1 : 2;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Data> parts;
    for (int pass = 0; pass < passes; ++pass) parts.push_back(batch(passes * step + pass, world * kRows));
    backward(parts, kind % 2 == 0);
  }
}

at::Tensor loss_of(auto& net, const Data& data, int part) {
  return torch::mse_loss(net(data.x.narrow(0, part * kRows, kRows)), data.y.narrow(0, part * kRows, kRows));
}

// Trains a wrapped model on this rank.
template <class Model>
void train_wrapped(Model& model, int kind, const Communicator& comm, Accumulation accumulation) {
  train(kind, comm.size(), accumulation, [&](const std::vector<Data>& parts, bool set_to_none) {
    model.zero_grad(set_to_none);
    for (size_t pass = 0; pass < parts.size(); ++pass) {
      std::optional<ScopeExit> alone;
      if (accumulation == Accumulation::kNoSync && pass == 0) alone.emplace(model.no_sync());
      const at::Tensor loss = loss_of(model, parts[pass], comm.rank());
      if (loss.requires_grad()) loss.backward();
    }
    model.step();
  });
}

// Trains in one process, with torch's optimizer.
void train_whole(RandomNet& net, torch::optim::Optimizer& optimizer, int kind, int world, Accumulation accumulation) {
  train(kind, world, accumulation, [&](const std::vector<Data>& parts, bool set_to_none) {
    optimizer.zero_grad(set_to_none);
    if (accumulation == Accumulation::kNoSync) {
      // Averages the ranks' own sums, pass after pass in each part.
      reference_backward(net, world, [&](int part) {
        const at::Tensor first = loss_of(net, parts[0], part);
        if (first.requires_grad()) first.backward();
        return loss_of(net, parts[1], part);
      });
    } else {
      for (const Data& data : parts) reference_backward(net, world, [&](int part) { return loss_of(net, data, part); });
    }
    optimizer.step();
  });
}

const auto kAdam = torch::optim::AdamOptions(1e-2);
const auto kSgd = torch::optim::SGDOptions(1e-2).momentum(0.9);
bool has_adam(int kind) { return kind % 2 == 0; }

RandomNet tree(int world, int kind, uint64_t seed) {
  return seeded(seed, [&] { return RandomNet(100 * world + kind); });
}

// Returns the tree that one process trained, shared by all ranks and stages.
const RandomNet& trained(int world, int kind, Accumulation accumulation) {
  static std::map<std::tuple<int, int, Accumulation>, RandomNet> known;
  const auto [entry, is_new] = known.try_emplace({world, kind, accumulation}, nullptr);
  if (!is_new) return entry->second;
  at::set_num_threads(1);
  RandomNet net = tree(world, kind, 7);
  const auto parameters = unique_parameters(*net);
  if (has_adam(kind)) {
    torch::optim::Adam adam(parameters, kAdam);
    train_whole(net, adam, kind, world, accumulation);
  } else {
    torch::optim::SGD sgd(parameters, kSgd);
    train_whole(net, sgd, kind, world, accumulation);
  }
  return entry->second = net;
}

void expect_parity(int world, int stage, Accumulation accumulation, const std::vector<int>& kinds) {
  std::map<int, RandomNet> references;
  for (int kind : kinds) references.emplace(kind, trained(world, kind, accumulation));
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    for (int kind : kinds) {
      auto model = tree(world, kind, comm->rank() > 0 ? 8 : 7);  // rank 0's values are used
      auto check = [&](auto&& wrapped) {
        train_wrapped(wrapped, kind, *comm, accumulation);
        expect_same_parameters(wrapped, *references.at(kind),
                               "stage " + std::to_string(stage) + " tree " + std::to_string(100 * world + kind));
      };
      if (has_adam(kind))
        check(zero(model, kAdam, comm, options(stage, kind)));
      else
        check(zero(model, kSgd, comm, options(stage, kind)));
      if (::testing::Test::HasFailure()) return;
    }
  });
}

TEST_P(Stages, RandomTreesTrainBitEqualToTheUnshardedLoop) {
  const auto [world, stage] = GetParam();
  expect_parity(world, stage, Accumulation::kNone, kinds_at(world, stage));
}
TEST_P(Stages, SumsMadeUnderNoSyncAreReducedWithTheLastBackward) {
  const auto [world, stage] = GetParam();
  expect_parity(world, stage, Accumulation::kNoSync, one_kind_at(world, stage));
}
TEST_P(StagesWithShardedGradients, AddUpOverBackwardPasses) {
  const auto [world, stage] = GetParam();
  expect_parity(world, stage, Accumulation::kReduceEach, one_kind_at(world, stage));
}

// libtorch's holders return a const module if they are const.
TEST(Wrappers, HandOutAModuleThatCanBeSwitchedToEvaluation) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    const auto check = [](const auto& wrapped) {
      wrapped.module()->eval();
      EXPECT_FALSE(wrapped.module()->is_training());
    };
    const auto model = [] { return torch::nn::Sequential(torch::nn::Linear(2, 2)); };
    check(DistributedDataParallel(model(), comm));
    check(FullyShardedDataParallel(model(), comm));
    check(zero(model(), torch::optim::SGDOptions(0.1), comm, {.stage = 2}));
    const auto sharded = model();
    OSS<torch::optim::SGD> optimizer(sharded->parameters(), torch::optim::SGDOptions(0.1), comm);
    check(ShardedDataParallel(sharded, optimizer, comm));
  });
}

TEST(Wrappers, RefuseAnEmptyModule) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    const auto expect_refusal = [&](const auto& empty) {
      for (int stage = 0; stage <= 3; ++stage)
        EXPECT_THROW(zero(empty, torch::optim::SGDOptions(0.1), comm, {.stage = stage}), std::invalid_argument);
    };
    expect_refusal(std::shared_ptr<torch::nn::SequentialImpl>());
    expect_refusal(torch::nn::Sequential(nullptr));
  });
}

}  // namespace
}  // namespace tessera::parity_test
