// Shards and gradients of one group of parameters.
#include "fsdp/flat_parameter.h"

#include "core/gradients/gradient_part.h"
#include "core/layout/unit_plan.h"
#include "tests/support/reference.h"

namespace tessera::flat_parameter_test {
using namespace internal;
namespace {

using namespace testing_support;

std::vector<PlannedParameter> parameters_of(std::vector<at::Tensor> tensors) {
  std::vector<PlannedParameter> parameters;
  for (size_t i = 0; i < tensors.size(); ++i)
    parameters.push_back({std::string("p").append(std::to_string(i)), {}, tensors[i]});
  return parameters;
}

std::vector<at::Tensor> tensors(int seed) {
  return seeded(seed, [] {
    return std::vector<at::Tensor>{torch::randn({3, 5}), torch::randn({}), torch::empty({0, 2}),
                                   torch::randn({4, 6}).t(), torch::randn({7})};
  });
}

TEST(FlatParameter, GathersWhatItWasMadeOf) {
  for (bool sync : {true, false}) {
    for (int world : {1, 2, 3, 5}) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        const auto expected = tensors(1);
        const auto own = tensors(sync ? 1 + comm->rank() : 1);
        FlatParameter group("a group", parameters_of(own), *comm, sync);
        at::Tensor full = torch::full({group.layout().full_numel()}, -1.0f);
        comm->all_gather(full, group.shard_for(full)).wait();
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(torch::equal(group.view_in(full, i), expected[i])) << i;
          EXPECT_EQ(group.view_in(full, i).strides(), expected[i].strides()) << i;
        }
      });
    }
  }
}

TEST(FlatParameter, GradientsAreSetThenAddedThenSetAgain) {
  on_ranks(1, [](std::shared_ptr<Communicator> comm) {
    FlatParameter group("a group", parameters_of({torch::zeros({4}), torch::zeros({3})}), *comm, true);
    auto& shards = group.parameter_shards();
    auto reduce = [&](double value, std::vector<bool> used) {
      at::Tensor destination = group.gradient().room(at::kFloat);
      destination.fill_(value);
      group.gradient().accept(destination, used);
    };
    reduce(1, {true, true});
    EXPECT_TRUE(group.gradient().whole_gradient().defined());
    reduce(2, {true, true});
    EXPECT_EQ(shards[0].grad().sum().item<float>(), 12);
    reduce(5, {false, true});  // the first is unused
    EXPECT_EQ(shards[0].grad().sum().item<float>(), 12);
    EXPECT_EQ(shards[1].grad().sum().item<float>(), 24);
    for (auto& shard : shards) shard.mutable_grad().reset();
    reduce(7, {true, false});
    EXPECT_EQ(shards[0].grad().sum().item<float>(), 28);
    EXPECT_FALSE(shards[1].grad().defined());
    EXPECT_FALSE(group.gradient().whole_gradient().defined());
    shards[0].mutable_grad().reset();
    EXPECT_EQ(group.gradient().bytes(), 0);
  });
}

TEST(FlatParameter, SplitsByDtypeAndByWhatTrains) {
  PlannedUnit unit{"u", parameters_of({torch::zeros({2}), torch::zeros({2}, at::kDouble), torch::zeros({3}),
                                       torch::zeros({1}).requires_grad_()})};
  const auto groups = split_into_flat_parameters(unit);
  ASSERT_EQ(groups.size(), 3U);
  EXPECT_EQ(groups[0].size(), 2U);
  EXPECT_EQ(groups[1][0].fqn, "p1");
  EXPECT_EQ(groups[2][0].fqn, "p3");
}

// The calls of torch::nn::utils::clip_grad_norm_, and similar ones.
TEST(GradientPart, IsNotScaledByItsOwnNorm) {
  const at::Tensor values = torch::tensor({3.0, 4.0});
  const at::Tensor part = as_part_of_gradient(values, "parameter 'fc.weight' on rank 1");
  const at::Tensor factor = torch::tensor(0.5);
  part.mul_(factor);  // no norm was computed
  EXPECT_EQ(part.data().norm().item<double>(), 2.5);
  part.mul_(0.5);  // a number, which the user chose
  const std::string refusal = "the gradient of parameter 'fc.weight' on rank 1 would be scaled by a tensor";
  expect_contains(error_of<std::logic_error>([&] { part.data().mul_(factor); }), refusal);
  expect_contains(error_of<std::logic_error>([&] { at::_foreach_mul_({part}, factor); }), refusal);
  part.mul_(torch::tensor({2.0, 2.0}));
  EXPECT_TRUE(torch::equal(values, torch::tensor({1.5, 2.0})));
  forget_norm(part);  // a new gradient
  part.mul_(factor);
  EXPECT_EQ(at::_foreach_norm({part})[0].item<double>(), 1.25);
  expect_contains(error_of<std::logic_error>([&] { part.mul_(factor); }), refusal);
  forget_norm(part);
  EXPECT_EQ(part.data().abs().max().item<double>(), 1);
  expect_contains(error_of<std::logic_error>([&] { part.data().mul_(factor); }), refusal);
  EXPECT_TRUE(torch::equal((part + 1).mul_(factor), torch::tensor({0.875, 1.0})));  // not a gradient
}

}  // namespace
}  // namespace tessera::flat_parameter_test
