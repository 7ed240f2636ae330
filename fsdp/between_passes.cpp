#include "fsdp/between_passes.h"

#include <algorithm>
#include <utility>

namespace tessera::internal {
namespace {

Range ranks_with(const FlatLayout& layout, int64_t parameter) {
  if (layout.numel(parameter) == 0) return {};
  const int64_t first = layout.offset(parameter), last = first + layout.numel(parameter) - 1;
  return {first / layout.shard_numel(), last / layout.shard_numel() + 1};
}

}  // namespace

BetweenPasses::BetweenPasses(ShardedModel& model) : model_(model) {
  for (const auto& unit : model.units())
    for (const auto& paged : unit->flat_parameters()) {
      FlatParameter& flat = paged->flat;
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        const at::Tensor& shard = flat.parameter_shards()[i];
        parameters_.push_back(
            {flat.parameters()[i], shard, ranks_with(flat.layout(), static_cast<int64_t>(i)), shard.requires_grad()});
      }
    }
}

uint64_t BetweenPasses::writes() const {
  uint64_t writes = 0;
  for (const auto& unit : model_.units())
    for (const auto& paged : unit->flat_parameters()) writes += paged->flat.shard_page().writes();
  return writes;
}

// Whether an optimizer step writes to shards on every rank. A rank whose elements have no gradients may write nothing.
bool BetweenPasses::all_ranks_step() const {
  std::vector<bool> steps(model_.mesh().shard->size(), false);
  for (const Parameter& parameter : parameters_)
    if (parameter.trained && parameter.has_gradient)
      std::fill(steps.begin() + parameter.ranks.begin, steps.begin() + parameter.ranks.end, true);
  return std::ranges::all_of(steps, [](bool rank) { return rank; });
}

void BetweenPasses::pass_begins(bool is_observed) {
  const Communicator& comm = *model_.mesh().shard;
  bool has_changed = !all_ranks_step_ || std::exchange(gradients_changed_, false);
  for (Parameter& parameter : parameters_) {
    const bool trains = parameter.planned.tensor.requires_grad();
    if (parameter.trained != trains) {
      model_.log().add(trains ? "unfreezing" : "freezing", parameter.planned.fqn, -1);
      parameter.trained = trains;
      has_changed = true;
    }
    // A rank without elements of a parameter may keep an empty `.grad`. On a device, the comparison would throw for it.
    if (comm.device().is_cpu() || parameter.ranks.numel() == comm.size())
      model_.log().add_kept(parameter.shard.grad().defined(), parameter.shard.numel() == 0);
  }
  if (has_changed) all_ranks_step_ = all_ranks_step();
  if (writes_ && writes() != *writes_ && *all_ranks_step_) model_.log().add("a step");
  writes_ = is_observed ? std::nullopt : std::optional(writes());
}

void BetweenPasses::pass_ended(bool is_observed) {
  for (Parameter& parameter : parameters_) {
    const bool has_gradient = parameter.shard.grad().defined();
    gradients_changed_ = gradients_changed_ || parameter.has_gradient != has_gradient;
    parameter.has_gradient = has_gradient;
  }
  writes_ = is_observed ? std::nullopt : std::optional(writes());
}

}  // namespace tessera::internal
