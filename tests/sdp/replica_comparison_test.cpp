#include "core/model/replica_comparison.h"

#include "core/layout/unit_plan.h"
#include "tests/support/reference.h"

namespace tessera::replica_comparison_test {
namespace {

using namespace testing_support;

std::vector<PlannedParameter> parameters() {
  const at::Tensor complex = torch::ones({2, 2}, at::kComplexDouble);
  return {{"fc.weight", {}, on_rank_device(torch::arange(6, at::kFloat).view({2, 3}))},
          {"fc.turned", {}, on_rank_device(torch::arange(6, at::kBFloat16).view({2, 3}).t())},
          {"empty", {}, on_rank_device(torch::empty({0}, at::kDouble))},
          {"complex", {}, on_rank_device(complex)},
          {"scale", {}, on_rank_device(torch::tensor(1.0))}};
}

// The bytes of a parameter with one bit changed.
void change_one_bit(const at::Tensor& parameter) {
  const at::Tensor on_host = parameter.cpu();
  static_cast<char*>(on_host.mutable_data_ptr())[0] ^= 1;
  parameter.copy_(on_host);
}

TEST(ReplicaComparison, NamesTheFirstParameterThatDiffersOnAnyRank) {
  for (const size_t changed : {0, 1, 3, 4})
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      ReplicaComparison comparison(1);
      const std::vector<PlannedParameter> own = parameters();
      comparison.count_step(own, *comm);  // equal
      if (comm->rank() == 1) change_one_bit(own[changed].tensor);
      if (comm->rank() == 2) change_one_bit(own.back().tensor);
      const std::string error = error_of<std::runtime_error>([&] { comparison.count_step(own, *comm); });
      expect_contains(error, "replicas have drifted apart: in step 2 parameter '" + own[changed].fqn + "'");
      expect_contains(error, changed == 4 ? "on rank 1, 2 than on rank 0" : "on rank 1 than on rank 0");
    });
}

TEST(ReplicaComparison, ComparesEveryNthStepAndSendsNothingOtherwise) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    ReplicaComparison off(0), third(3);
    const std::vector<PlannedParameter> own = parameters();
    for (int step = 1; step <= 6; ++step) {
      const int64_t before = comm->traffic().sent_bytes;
      off.count_step(own, *comm);
      EXPECT_EQ(comm->traffic().sent_bytes, before);
      third.count_step(own, *comm);
      EXPECT_EQ(comm->traffic().sent_bytes > before, step % 3 == 0) << step;
    }
  });
}

TEST(ReplicaComparison, IsAskedForByTheEnvironment) {
  EXPECT_EQ(steps_between_comparisons(nullptr), 0);
  EXPECT_EQ(steps_between_comparisons(""), 0);
  EXPECT_EQ(steps_between_comparisons("replicas"), 100);
  EXPECT_EQ(steps_between_comparisons("replicas:10"), 10);
  for (const char* bad : {"replica", "replicas:", "replicas:0", "replicas:-1", "replicas:2x"})
    expect_contains(error_of<std::invalid_argument>([&] { steps_between_comparisons(bad); }),
                    "TESSERA_DEBUG is '" + std::string(bad) + "', expected 'replicas' or 'replicas:N'");
  EXPECT_THROW(ReplicaComparison(-1), std::invalid_argument);
}

// Each rank steps with its own gradients: replicas drift apart.
TEST(ReplicaComparison, FindsAStepWithGradientsThatWereNotAveraged) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return torch::nn::Linear(4, 4); });
    const at::Tensor x = seeded(2 + comm->rank(), [] { return torch::randn({3, 4}); });
    OSS<torch::optim::SGD> oss(model->parameters(), torch::optim::SGDOptions(0.1), comm);
    DistributedDataParallel ddp(model, comm, {.compare_replicas_every = 2});
    torch::optim::SGD alone(model->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      ddp(x).square().mean().backward();
      oss.step();
    }
    {
      const ScopeExit scope = ddp.no_sync();
      ddp(x).square().mean().backward();
    }
    alone.step();
    ddp.zero_grad();
    expect_contains(error_of<std::runtime_error>([&] { ddp(x); }),
                    "in step 4 parameter 'weight' has other values on rank 1 than on rank 0");
  });
}

TEST(ReplicaComparison, FollowsAStepOfOss) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto model = seeded(1, [] { return torch::nn::Linear(4, 4); });
    model->bias.requires_grad_(false);  // no step publishes it
    OSS<torch::optim::SGD> oss(model->parameters(), torch::optim::SGDOptions(0.1), comm, {.compare_replicas_every = 1});
    oss.step();
    if (comm->rank() == 1) model->bias.data().add_(1);
    expect_contains(error_of<std::runtime_error>([&] { oss.step(); }), "in step 2 parameter '1 of group 0' has other");
  });
}

}  // namespace
}  // namespace tessera::replica_comparison_test
