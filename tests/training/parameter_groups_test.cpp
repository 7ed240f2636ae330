#include <tessera/optim/parameter_groups.h>

#include <tessera/ddp.h>
#include <tessera/fsdp.h>
#include <tessera/optim/fused_optimizers.h>
#include <tessera/optim/host_adam.h>
#include <tessera/zero.h>

#include <set>

#include "tests/support/reference.h"

namespace tessera::parameter_groups_test {
using namespace internal;
namespace {

using namespace testing_support;
using torch::optim::AdamWOptions;

struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(6, 4));
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 4));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  at::Tensor forward(const at::Tensor& x) { return norm(linear(embedding(x))); }
};
TORCH_MODULE(Net);

using Names = std::set<std::string>;

// The names of the parameters in each group, and the weight decay of each.
void expect_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const torch::OrderedDict<std::string, at::Tensor>& named, const Names& decayed) {
  ASSERT_EQ(groups.size(), 2u);
  Names first, all;
  for (const auto& entry : named) {
    all.insert(entry.key());
    for (const at::Tensor& tensor : groups[0].params())
      if (tensor.is_same(entry.value())) first.insert(entry.key());
  }
  EXPECT_EQ(first, decayed);
  EXPECT_EQ(groups[0].params().size() + groups[1].params().size(), all.size());
  EXPECT_EQ(static_cast<const AdamWOptions&>(groups[0].options()).weight_decay(), 0.1);
  EXPECT_EQ(static_cast<const AdamWOptions&>(groups[1].options()).weight_decay(), 0.0);
  EXPECT_EQ(static_cast<const AdamWOptions&>(groups[1].options()).lr(), 0.5);
}

TEST(DecayGroups, FollowTheShapesOfWholeParametersUnderEveryWrapper) {
  const auto options = AdamWOptions(0.5).weight_decay(0.1);
  const Names matrices{"embedding.weight", "linear.weight"};
  for (const int world : {1, 3})
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(Net(), comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      DistributedDataParallel ddp(Net(), comm);
      Net net;
      for (const auto& named : {fsdp.named_parameters(), ddp.named_parameters(), net->named_parameters()}) {
        expect_groups(decay_groups(named, options), named, matrices);
        expect_groups(decay_groups(named, options, {"embedding"}), named, {"linear.weight"});
        EXPECT_EQ(whole_sizes(named["embedding.weight"]), (std::vector<int64_t>{6, 4}));
        EXPECT_EQ(whole_sizes(named["linear.bias"]), (std::vector<int64_t>{4}));
      }
      for (const int stage : {0, 1, 2, 3}) {
        ZeroOptions zero_options{.stage = stage};
        zero_options.groups = [&](const ZeroOptions::Parameters& named) {
          auto groups = decay_groups(named, options);
          expect_groups(groups, named, matrices);
          return groups;
        };
        auto model = zero(Net(), options, comm, zero_options);
        model(on_rank_device(torch::zeros({2}, at::kLong))).sum().backward();
        model.step();
      }
    });
}

TEST(DecayGroups, HaveATiedWeightOnceUnderItsFirstName) {
  const at::Tensor tied = torch::ones({6, 4}), other = torch::ones({4, 4});
  const torch::OrderedDict<std::string, at::Tensor> named({{"embedding", tied}, {"linear", other}, {"head", tied}});
  expect_groups(decay_groups(named, AdamWOptions(0.5).weight_decay(0.1), {"embedding"}),
                torch::OrderedDict<std::string, at::Tensor>({{"embedding", tied}, {"linear", other}}), {"linear"});
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto named_here = torch::OrderedDict<std::string, at::Tensor>(
        {{"embedding", on_rank_device(torch::ones({6, 4}))}, {"linear", on_rank_device(torch::ones({4, 4}))}});
    auto with_head = named_here;
    with_head.insert("head", named_here["embedding"]);
    const auto options = AdamWOptions(0.5).weight_decay(0.1);
    EXPECT_NO_THROW(OSS<torch::optim::AdamW>(decay_groups(with_head, options, {"embedding"}), options, comm));
  });
}

TEST(GroupParameters, ARuleWithoutAFunctionIsRefused) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    DistributedDataParallel ddp(torch::nn::Linear(2, 2), comm);
    const GroupRule<AdamWOptions> rule{.options = AdamWOptions(0.5)};
    expect_contains(error_of<std::invalid_argument>([&] { group_parameters(ddp, {rule}, AdamWOptions(0.5)); }),
                    "group_parameters: a rule's `matches` is empty");
  });
}

// libtorch 2.15 gives a group whose decay is the default of its class, 0, the decay of the optimizer.
TEST(DecayGroups, DecayNothingElseWhateverTheOptimizersDefaultsAre) {
  const auto check = [](const auto& options, const auto make) {
    auto matrix = torch::ones({2, 2}).set_requires_grad(true), vector = torch::ones({2}).set_requires_grad(true);
    const auto optimizer = make(
        decay_groups(torch::OrderedDict<std::string, at::Tensor>({{"matrix", matrix}, {"vector", vector}}), options));
    for (at::Tensor* parameter : {&matrix, &vector}) parameter->mutable_grad() = torch::zeros_like(*parameter);
    optimizer->step();
    EXPECT_FALSE(torch::equal(matrix.detach(), torch::ones({2, 2})));
    EXPECT_TRUE(torch::equal(vector.detach(), torch::ones({2})));
  };
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  const auto sgd = torch::optim::SGDOptions(0.5).weight_decay(0.1);
  const auto adam = torch::optim::AdamOptions(0.5).weight_decay(0.1);
  const auto adamw = AdamWOptions(0.5).weight_decay(0.1);
  const auto lion = LionOptions(0.5).weight_decay(0.1);
  check(sgd, [&](const Groups& groups) { return std::make_unique<torch::optim::SGD>(groups, sgd); });
  check(sgd, [&](const Groups& groups) { return std::make_unique<SGD>(groups, sgd); });
  check(adam, [&](const Groups& groups) { return std::make_unique<torch::optim::Adam>(groups, adam); });
  check(adam, [&](const Groups& groups) { return std::make_unique<HostAdam>(groups, adam); });
  check(adamw, [&](const Groups& groups) { return std::make_unique<torch::optim::AdamW>(groups, adamw); });
  check(lion, [&](const Groups& groups) { return std::make_unique<Lion>(groups, lion); });
}

}  // namespace
}  // namespace tessera::parameter_groups_test
