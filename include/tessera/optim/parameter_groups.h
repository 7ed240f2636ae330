#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/model/model_shards.h>

namespace tessera {

// Selects parameters for a group by their NamedShard: name, shape of the whole parameter (`sizes`).
template <class Options>
struct GroupRule {
  std::function<bool(const NamedShard&)> matches;  // must return equal results on all ranks
  Options options;                                 // options of the group, e.g. torch's AdamOptions
};

// Splits the parameters of a wrapped model into optimizer groups. Each rule makes a group of the parameters that no
// earlier rule matches; the last group has the rest, with the options `rest`. All ranks get equal groups in the same
// order; a group may be empty.
//
//   auto no_decay = tessera::GroupRule<AdamWOptions>{
//       [](const tessera::NamedShard& p) { return p.sizes.size() < 2; }, AdamWOptions(1e-3).weight_decay(0)};
//   tessera::AdamW optimizer(tessera::group_parameters(fsdp, {no_decay}, AdamWOptions(1e-3).weight_decay(0.1)));
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> group_parameters(const ModelShards& model,
                                                                const std::vector<GroupRule<Options>>& rules,
                                                                const Options& rest) {
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

}  // namespace tessera
