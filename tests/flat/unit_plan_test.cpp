// The assignment of parameters to units.
#include "core/layout/unit_plan.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "tests/support/random_net.h"

namespace tessera::unit_plan_test {
using namespace internal;
namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("linear", linear);
  }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4})};
  torch::nn::Linear linear{4, 4};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_parameter("scale", torch::ones({}));
    register_module("embedding", embedding);
    register_module("blocks", blocks);
    for (int i = 0; i < 2; ++i) blocks->push_back(Block());
    register_module("head", head);
    register_module("again", blocks[0]);       // one module under a second name
    register_parameter("tied", head->weight);  // one tensor under a second name
  }
  torch::nn::Embedding embedding{10, 4};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{4, 10};
};

using Plan = std::vector<std::pair<std::string, std::vector<std::string>>>;

Plan names(const std::vector<PlannedUnit>& units) {
  Plan plan;
  for (const auto& unit : units) {
    plan.push_back({unit.name, {}});
    for (const auto& parameter : unit.parameters) plan.back().second.push_back(parameter.fqn);
  }
  return plan;
}

TEST(UnitPlan, WithoutAPolicyEverythingIsTheRoots) {
  NetImpl net;
  const auto plan = plan_units(net, {});
  ASSERT_EQ(plan.size(), 1U);
  EXPECT_EQ(plan[0].name, "(root)");
  EXPECT_EQ(plan[0].parameters.size(), 2U + 1 + 2 * 4 + 1);  // head.weight is the root's own, "tied"
}

TEST(UnitPlan, ByType) {
  NetImpl net;
  EXPECT_EQ(names(plan_units(net, wrap_modules<BlockImpl>())),
            (Plan{{"(root)", {"scale", "tied", "embedding.weight", "head.bias"}},
                  {"blocks.0",
                   {"blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.linear.weight", "blocks.0.linear.bias"}},
                  {"blocks.1",
                   {"blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.1.linear.weight", "blocks.1.linear.bias"}}}));
}

TEST(UnitPlan, TiedAndSharedParametersKeepAllTheirNames) {
  NetImpl net;
  const auto plan = plan_units(net, wrap_modules<BlockImpl>());
  EXPECT_EQ(plan[0].parameters[1].aliases, std::vector<std::string>{"head.weight"});
  EXPECT_EQ(plan[1].parameters[0].aliases, std::vector<std::string>{"again.norm.weight"});
}

TEST(UnitPlan, NestedModulesOfTheTypesClaimTheirOwn) {
  NetImpl net;
  const auto plan = names(plan_units(net, wrap_modules<BlockImpl, torch::nn::LinearImpl>()));
  EXPECT_EQ(plan[1], (std::pair<std::string, std::vector<std::string>>{
                         "blocks.0", {"blocks.0.norm.weight", "blocks.0.norm.bias"}}));
  EXPECT_EQ(plan[2].first, "blocks.0.linear");
}

TEST(UnitPlan, BySizeTakesTheSmallestSubtreesThatReachIt) {
  NetImpl net;
  std::vector<std::string> units;
  for (const auto& unit : plan_units(net, wrap_by_size(28))) units.push_back(unit.name);
  EXPECT_EQ(units,
            (std::vector<std::string>{"(root)", "embedding", "blocks.0", "blocks.1"}));  // the head: a bias of 10
  units.clear();
  for (const auto& unit : plan_units(net, wrap_by_size(50))) units.push_back(unit.name);
  EXPECT_EQ(units, (std::vector<std::string>{"(root)", "blocks"}));  // 28 each, 56 together
}

TEST(UnitPlan, ByPredicateOnNames) {
  NetImpl net;
  const auto plan =
      plan_units(net, wrap_if([](const std::string& fqn, const torch::nn::Module&) { return fqn == "head"; }));
  ASSERT_EQ(plan.size(), 2U);
  EXPECT_EQ(plan[1].name, "head");
  EXPECT_EQ(plan[1].parameters.size(), 1U);  // the bias: the root registered the weight first
}

TEST(UnitPlan, OfRandomTreesHasEachParameterOnceWhateverThePolicy) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    testing_support::RandomNet net(seed);
    const WrapPolicy policies[] = {{}, wrap_by_size(1), wrap_by_size(100), wrap_modules<torch::nn::LinearImpl>()};
    for (const auto& policy : policies) {
      std::set<const c10::TensorImpl*> planned;
      std::set<std::string> named;
      for (const auto& unit : plan_units(*net, policy)) {
        EXPECT_FALSE(unit.parameters.empty());
        for (const auto& parameter : unit.parameters) {
          EXPECT_TRUE(planned.insert(parameter.tensor.unsafeGetTensorImpl()).second);
          named.insert(parameter.fqn);
          named.insert(parameter.aliases.begin(), parameter.aliases.end());
        }
      }
      for (const auto& entry : net->named_parameters()) {
        EXPECT_TRUE(planned.contains(entry.value().unsafeGetTensorImpl())) << entry.key();
        EXPECT_TRUE(named.contains(entry.key())) << entry.key();
      }
    }
  }
}

TEST(UnitPlan, FirstUnitsFitIntoTheirFractionOfAllElements) {
  std::vector<PlannedUnit> plan;
  for (const int64_t numel : {50, 20, 0, 20, 10}) {
    plan.push_back({"unit", {}});
    plan.back().parameters.push_back({"weight", {}, torch::zeros({numel}), false});
  }
  EXPECT_EQ(first_units(plan, 0), std::vector<bool>({false, false, false, false, false}));
  EXPECT_EQ(first_units(plan, 0.35), std::vector<bool>({false, true, true, false, true}));
  EXPECT_EQ(first_units(plan, 0.5), std::vector<bool>({true, false, true, false, false}));
  EXPECT_EQ(first_units(plan, 1), std::vector<bool>({true, true, true, true, true}));
}

}  // namespace
}  // namespace tessera::unit_plan_test
