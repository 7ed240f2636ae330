#pragma once

#include <torch/optim/optimizer.h>
#include <torch/version.h>

#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include <tessera/model/model_shards.h>

namespace tessera {

// Selects parameters for a group by their NamedShard, for example by `fqn` or by `sizes` of the whole parameter.
template <class Options>
struct GroupRule {
  std::function<bool(const NamedShard&)> matches{};  // must return equal results on all ranks
  Options options{};                                 // options of the group, for example torch's AdamOptions
};

// Splits the parameters of a wrapped model into optimizer groups. A parameter belongs to the group of the first rule
// that matches it. The last group has all other parameters, with the options `rest`. All ranks get equal groups in the
// same order. A group may be empty. In libtorch 2.15, an option with its class's default value counts as not set: the
// optimizer's default applies.
//
//   auto no_decay = tessera::GroupRule<AdamWOptions>{
//       [](const tessera::NamedShard& p) { return p.sizes.size() < 2; }, AdamWOptions(1e-3).weight_decay(0)};
//   tessera::AdamW optimizer(tessera::group_parameters(fsdp, {no_decay}, AdamWOptions(1e-3).weight_decay(0.1)));
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> group_parameters(const ModelShards& model,
                                                                const std::vector<GroupRule<Options>>& rules,
                                                                const Options& rest) {
  for (const GroupRule<Options>& rule : rules)
    if (!rule.matches)
      throw std::invalid_argument("group_parameters: a rule's `matches` is empty, expected a function");
  std::vector<std::vector<at::Tensor>> members(rules.size() + 1);
  for (const NamedShard& shard : model.named_shards()) {
    size_t group = 0;
    while (group < rules.size() && !rules[group].matches(shard)) ++group;
    members[group].push_back(shard.tensor);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t group = 0; group < members.size(); ++group)
    groups.emplace_back(std::move(members[group]),
                        std::make_unique<Options>(group < rules.size() ? rules[group].options : rest));
  return groups;
}

// Returns the usual two groups: first the parameters with weight decay and `options`, then all others with
// weight_decay(0). These others are the parameters of fewer than two dimensions in the module (biases, norms), and the
// parameters whose name contains a text of `no_decay` ("embedding"). A tied weight, which a module lists under each of
// its names, counts once, under the first. A group may be empty.
//
//   torch::optim::AdamW optimizer(tessera::decay_groups(fsdp.named_parameters(), AdamWOptions(1e-3).weight_decay(0.1)),
//                                 AdamWOptions(1e-3));
//
// `named_parameters` may be those of a wrapper, those of a module (for OSS), or the argument of ZeroOptions::groups.
// All ranks get equal groups.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> decay_groups(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters, const Options& options,
    const std::vector<std::string>& no_decay = {}) {
  std::vector<at::Tensor> decayed, others;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : named_parameters) {
    if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
    bool decays = whole_sizes(parameter.value()).size() >= 2;
    for (const std::string& text : no_decay) decays = decays && parameter.key().find(text) == std::string::npos;
    (decays ? decayed : others).push_back(parameter.value());
  }
  Options without = options;
  without.weight_decay(0.0);
  // A newer libtorch, such as 2.15, would replace 0 by the optimizer's decay if 0 is the default of the class, as for
  // SGD and Adam. The smallest positive number is not replaced, and as weight decay changes no parameter.
  if constexpr (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR > 211 && std::is_constructible_v<Options, double>)
    if (Options(1.0).weight_decay() == 0) without.weight_decay(std::numeric_limits<double>::denorm_min());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decayed), std::make_unique<Options>(options));
  groups.emplace_back(std::move(others), std::make_unique<Options>(without));
  return groups;
}

}  // namespace tessera
