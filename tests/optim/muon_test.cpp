// Muon: the iteration, and equal results with and without sharding.
#include "tests/optim/given_gradients.h"
#include "tests/support/temporary_folder.h"

namespace tessera::muon_test {
using namespace internal;
namespace {

using namespace testing_support;

// Matrices with more than one row and column to Muon, the rest to AdamW.
std::vector<torch::optim::OptimizerParamGroup> grouped(const torch::OrderedDict<std::string, at::Tensor>& parameters,
                                                       const MuonOptions& options) {
  static const std::set<std::string> kOthers{"a.bias", "a.scalar", "b.one", "b.wide"};
  std::vector<at::Tensor> matrices, others;
  for (const auto& item : parameters) (kOthers.contains(item.key()) ? others : matrices).push_back(item.value());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  groups.emplace_back(others, std::make_unique<MuonOptions>(MuonOptions(options).use_muon(false)));
  return groups;
}

TEST(Muon, BringsSingularValuesNearOne) {
  for (const auto& sizes : {std::vector<int64_t>{8, 30}, {30, 8}, {16, 16}}) {
    const at::Tensor x = seeded(1, [&] { return torch::randn(sizes); });
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor result = orthogonalized(x.to(dtype)).to(at::kFloat);
      const at::Tensor values = std::get<1>(torch::svd(result));
      EXPECT_GT(values.min().item<float>(), 0.3);
      EXPECT_LT(values.max().item<float>(), 1.3);
    }
    const auto [u, s, v] = torch::svd(x);
    EXPECT_TRUE(torch::allclose(orthogonalized(x, 5), u.matmul(v.t()), 0.5, 0.35));
  }
  EXPECT_EQ(orthogonalized(torch::zeros({3, 4})).abs().max().item<float>(), 0);
}

// One step by hand: momentum, Nesterov, decay, both scalings.
TEST(Muon, IsTheFormula) {
  for (const bool match : {false, true}) {
    at::Tensor weight = seeded(1, [] { return torch::randn({6, 3}); }).set_requires_grad(true);
    const at::Tensor before = weight.detach().clone(), gradient = seeded(2, [] { return torch::randn({6, 3}); });
    weight.mutable_grad() = gradient;
    Muon muon({weight}, MuonOptions(0.1).momentum(0.9).weight_decay(0.5).bfloat16(false).match_rms_adamw(match));
    muon.step();
    const at::Tensor direction = 0.9 * 0.1 * gradient + 0.1 * gradient;
    const double scale = match ? 0.2 * std::sqrt(6.0) : std::sqrt(2.0);
    EXPECT_TRUE(torch::allclose(weight, before * 0.95 - 0.1 * scale * orthogonalized(direction), 1e-5, 1e-6));
  }
}

// AdamW's fused kernel rounds differently at the ends of shards; matrices are bit-equal (see the next test).
TEST(Muon, IsTheSameInEveryStageAtEveryWorldSize) {
  expect_exact_everywhere<Muon>(MuonOptions(2e-2), 1e-6, Grouping<MuonOptions>(&grouped));
}

TEST(Muon, MatricesAreEqualBitForBit) {
  const TemporaryFolder disk;
  for (const bool bfloat16 : {false, true}) {
    const auto options = MuonOptions(2e-2).bfloat16(bfloat16).match_rms_adamw(bfloat16);
    const auto expected = stepped<Muon>({}, options, 0, 4, Grouping<MuonOptions>(&grouped));
    for (const Layout& layout : {Layout{3, 3}, Layout{5, 3}, Layout{4, 3, 2}, Layout{3, 0}, Layout{3, 2},
                                 Layout{2, 3, 0, true, disk.path().string()}}) {
      const auto got = stepped<Muon>(layout, options, 0, 4, Grouping<MuonOptions>(&grouped));
      for (const char* name : {"a.square", "a.tall", "a.transposed", "b.conv", "b.large", "b.empty"})
        EXPECT_TRUE(torch::equal(got.at(name), expected.at(name))) << name_of(layout) << " " << name;
    }
  }
}

TEST(Muon, CheckpointsGoOnAtAnyWorldSize) {
  const TemporaryFolder folder;
  const auto options = MuonOptions(2e-2);
  const Grouping<MuonOptions> grouping = &grouped;
  const auto expected = stepped<Muon>({}, options, 0, 6, grouping);
  stepped<Muon>({3, 3}, options, 0, 2, grouping, {.save = folder / "a"});
  stepped<Muon>({2, 2}, options, 2, 3, grouping, {folder / "a", folder / "b"});
  stepped<Muon>({1, 0}, options, 3, 4, grouping, {folder / "b", folder / "c"});
  expect_same(stepped<Muon>({5, 3}, options, 4, 6, grouping, {.load = folder / "c"}), expected, 1e-6, "the chain");
}

// Each matrix is one rank's work. A rank sends about its own part, and as much of results.
TEST(Muon, SendsPartsOnceAndResultsOnce) {
  for (int world : {2, 4}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Sequential model;
      for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(32, 32).bias(false)));
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      Muon muon(fsdp, MuonOptions(1e-2));
      for (const NamedShard& shard : fsdp.named_shards()) {
        at::Tensor leaf = shard.tensor;
        leaf.mutable_grad() = torch::ones_like(leaf).detach();
      }
      const auto before = comm->traffic();
      muon.step();
      const int64_t bf16_bytes = 8 * 32 * 32 * 2, own = 8;  // and one byte a parameter, to every other rank
      EXPECT_EQ(comm->traffic().sent_bytes - before.sent_bytes,
                2 * bf16_bytes / world * (world - 1) / world + own * (world - 1));
    });
  }
}

TEST(Muon, RanksFinishTogether) {
  const std::vector<int64_t> sizes{64, 64, 32, 32, 32, 32, 128, 16, 16};
  std::vector<int64_t> costs;
  for (const int64_t size : sizes)
    costs.push_back(Muon::step_cost({"", {}, {size, 64}, {64, 1}, {0, size * 64}, {}}, MuonOptions()));
  EXPECT_EQ(costs[0], 5 * 64 * 64 * 3 * 64);
  EXPECT_EQ(costs[2], 5 * 32 * 32 * (2 * 64 + 32));
  EXPECT_EQ(Muon::step_cost({"", {}, {64, 64}, {64, 1}, {0, 4096}, {}}, MuonOptions::adamw(1e-3)), 0);
  // OSS balances expensive matrices by cost: each of 3 ranks gets one of 3 squares, however large the embedding is.
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    std::vector<at::Tensor> squares;
    for (int i = 0; i < 3; ++i) squares.push_back(torch::zeros({16, 16}).set_requires_grad(true));
    groups.emplace_back(std::vector<at::Tensor>{torch::zeros({900, 8}).set_requires_grad(true)},
                        std::make_unique<MuonOptions>(MuonOptions::adamw(1e-3)));
    groups.emplace_back(squares, std::make_unique<MuonOptions>(1e-2));
    OSS<Muon> optimizer(groups, MuonOptions(1e-2), comm);
    EXPECT_EQ(optimizer.owner(squares[0]) + optimizer.owner(squares[1]) + optimizer.owner(squares[2]), 0 + 1 + 2);
  });
}

TEST(Muon, MistakesAreNamed) {
  auto vector = torch::ones({3}).set_requires_grad(true);
  vector.mutable_grad() = torch::ones({3});
  Muon muon({vector});
  expect_contains(error_of<std::invalid_argument>([&] { muon.step(); }), "MuonOptions::adamw()");
  EXPECT_TRUE(torch::equal(vector, torch::ones({3})));
  auto scalar = torch::ones({}).set_requires_grad(true);
  scalar.mutable_grad() = torch::ones({});
  expect_contains(error_of<std::invalid_argument>([&] { Muon({scalar}).step(); }), "Muon: a parameter of shape [] is");
  expect_contains(error_of<std::invalid_argument>([&] { Muon other({vector}, MuonOptions(1e-2).momentum(1)); }),
                  "Muon: momentum is 1, expected 0 or more and below 1");
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel biased(torch::nn::Linear(4, 2), comm);
    Muon of_all(biased, {torch::optim::OptimizerParamGroup(biased.parameters())});
    biased(torch::ones({1, 4})).sum().backward();
    expect_contains(error_of<std::invalid_argument>([&] { of_all.step(); }), "Muon: 'bias' of shape [2] is");
    FullyShardedDataParallel fsdp(torch::nn::Linear(4, 4), comm);
    expect_contains(error_of<std::invalid_argument>([&] { Muon other(fsdp.parameters()); }),
                    "is a shard of FullyShardedDataParallel: give the wrapper");
    expect_contains(error_of<std::invalid_argument>([&] {
                      Muon other(fsdp, {torch::optim::OptimizerParamGroup({torch::ones({3}).set_requires_grad(true)})});
                    }),
                    "none of the wrapper's");
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(fsdp.parameters(), std::make_unique<torch::optim::AdamWOptions>(1e-3));
    expect_contains(error_of<std::invalid_argument>([&] { Muon other(fsdp, groups); }), "options of another optimizer");
  });
}

}  // namespace
}  // namespace tessera::muon_test
