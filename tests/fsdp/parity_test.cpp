// FSDP against the unsharded loop, bit for bit: random module trees, worlds, policies and options.

#include <map>

#include "tests/support/matrix.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::parity_test {
using namespace internal;
namespace {

using namespace testing_support;

WrapPolicy policy(int kind) {
  switch (kind % 5) {
    case 0:
      return {};
    case 1:
      return wrap_modules<torch::nn::LinearImpl, torch::nn::GRUImpl>();
    case 2:
      return wrap_by_size(60);
    case 3:
      return wrap_by_size(1);
    default:
      return wrap_if([](const std::string& fqn, const torch::nn::Module&) { return fqn.size() % 3 != 0; });
  }
}

FsdpOptions options(int kind) {
  FsdpOptions options;
  options.auto_wrap = policy(kind);
  options.reshard_after_forward = kind % 2 == 0;
  options.prefetch = kind % 4;
  options.keep_recent = 1 + kind % 3;
  options.sync_module_states = kind % 3 != 0;
  return options;
}

std::unique_ptr<torch::optim::Optimizer> optimizer(int kind, std::vector<at::Tensor> parameters) {
  if (kind % 2 == 0) return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1e-2).momentum(0.9));
}

// A selection of ten pairs of trees and options: every second one, so that each world has each policy; fewer under
// sanitizers (tests/TestEnvironment.cmake).
std::vector<int> kinds_at(int world) {
  std::vector<int> kinds;
  if (has_full_matrix()) {
    for (int kind = 0; kind < 10; ++kind) kinds.push_back(kind);
  } else {
    for (int i = 0; i < trees_to_test(5); ++i) kinds.push_back(2 * i + world % 2);
  }
  return kinds;
}

struct Data {
  at::Tensor x, y;
};

Data batch(int step, int rows) {
  return seeded(1000 + step, [&] { return Data{torch::randn({rows, kWidth}), torch::randn({rows, kWidth})}; });
}

class Parity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Parity, testing::Values(1, 2, 3, 4, 5));

constexpr int kRows = 4, kSteps = 20;  // rows of each rank

RandomNet tree(int world, int kind, uint64_t seed) {
  return seeded(seed, [&] { return RandomNet(100 * world + kind); });
}

at::Tensor loss_of(auto& net, const Data& data, int part) {
  return torch::mse_loss(net(data.x.narrow(0, part * kRows, kRows)), data.y.narrow(0, part * kRows, kRows));
}

// The tree after training in one process; computed once for all ranks.
RandomNet trained(int world, int kind) {
  at::set_num_threads(1);
  RandomNet net = tree(world, kind, 7);
  auto whole = optimizer(kind, unique_parameters(*net));
  for (int step = 0; step < kSteps; ++step) {
    const Data data = batch(step, world * kRows);
    whole->zero_grad();
    reference_backward(net, world, [&](int rank) { return loss_of(net, data, rank); });
    whole->step();
  }
  return net;
}

TEST_P(Parity, RandomTreesTrainBitEqualToTheUnshardedLoop) {
  const int world = GetParam();
  std::map<int, RandomNet> references;
  for (int kind : kinds_at(world)) references.emplace(kind, trained(world, kind));
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    for (int kind : kinds_at(world)) {
      // Without sync_module_states the caller must give all ranks the same values.
      const FsdpOptions chosen = options(kind);
      auto model = tree(world, kind, chosen.sync_module_states && comm->rank() > 0 ? 8 : 7);
      FullyShardedDataParallel fsdp(model, comm, chosen);
      const std::string where = "tree " + std::to_string(100 * world + kind);
      expect_same_parameters(fsdp, *tree(world, kind, 7), where + " at the start:");
      auto sharded = optimizer(kind, fsdp.parameters());
      for (int step = 0; step < kSteps; ++step) {
        sharded->zero_grad();
        const at::Tensor loss = loss_of(fsdp, batch(step, world * kRows), comm->rank());
        if (loss.requires_grad()) loss.backward();
        sharded->step();
      }
      expect_same_parameters(fsdp, *references.at(kind), where + " after training:");
      EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
      EXPECT_EQ(fsdp.memory().bucket_bytes, 0);
      if (testing::Test::HasFailure()) return;
    }
  });
}

// One process on the whole batch differs only in the order of additions.
TEST(ParityToRounding, RanksAgreeWithOneProcessOnTheWholeBatch) {
  std::vector<at::Tensor> results;
  for (int world : {1, 2, 4}) {
    at::Tensor result;
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(3, [] {
        return torch::nn::Sequential(torch::nn::Linear(kWidth, 33), torch::nn::GELU(), torch::nn::Linear(33, kWidth));
      });
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      torch::optim::SGD sgd(fsdp.parameters(), 0.1);
      const int rows = 8 / world;
      for (int step = 0; step < 20; ++step) {
        const Data data = batch(step, 8);
        sgd.zero_grad();
        torch::mse_loss(fsdp(data.x.narrow(0, comm->rank() * rows, rows)), data.y.narrow(0, comm->rank() * rows, rows))
            .backward();
        sgd.step();
      }
      auto state = fsdp.full_state_dict();
      if (comm->rank() == 0) result = state["0.weight"];
    });
    results.push_back(result);
  }
  EXPECT_TRUE(torch::allclose(results[0], results[1], 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(results[0], results[2], 1e-5, 1e-6));
}

TEST(ParityToItself, RunsAndOptionsGiveTheSameBits) {
  std::vector<torch::OrderedDict<std::string, at::Tensor>> results;
  for (int run = 0; run < 6; ++run) {
    torch::OrderedDict<std::string, at::Tensor> result;
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      auto model = seeded(5, [] { return RandomNet(42); });
      FullyShardedDataParallel fsdp(model, comm,
                                    {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                                     .reshard_after_forward = run % 2 == 0,
                                     .prefetch = run % 3,
                                     .keep_recent = 1 + run % 2});
      torch::optim::Adam adam(fsdp.parameters(), 1e-2);
      for (int step = 0; step < 10; ++step) {
        const Data data = batch(10 * step + comm->rank(), 4);
        adam.zero_grad();
        torch::mse_loss(fsdp(data.x), data.y).backward();
        adam.step();
      }
      auto state = fsdp.full_state_dict();
      if (comm->rank() == 0) result = state;
    });
    results.push_back(result);
  }
  for (const auto& result : results)
    for (const auto& entry : result) EXPECT_TRUE(torch::equal(entry.value(), results[0][entry.key()])) << entry.key();
}

}  // namespace
}  // namespace tessera::parity_test
