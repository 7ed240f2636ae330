#include "plan/report/plan_search.h"

#include <algorithm>

namespace tessera::internal {
namespace {

// Returns choices that differ from `choice` in one option other than the stage, and in options that depend on this one.
std::vector<TrainingChoice> neighbours(const TrainingChoice& choice, const Machines& machines) {
  std::vector<TrainingChoice> all;
  const auto add = [&](auto change) {
    TrainingChoice other = choice;
    change(other);
    if (!(other == choice)) all.push_back(other);
  };
  add([](TrainingChoice& other) { other.checkpointed = !other.checkpointed; });
  if (choice.stage > 0) add([](TrainingChoice& other) { other.offload = !other.offload; });
  add([](TrainingChoice& other) { other.bf16 = !other.bf16; });
  if (choice.stage < 3) return all;
  add([](TrainingChoice& other) {
    other.reshard_after_forward = !other.reshard_after_forward;
    other.ranks_per_secondary_copy = 0;
  });
  for (const UnitChoice units : {UnitChoice::kLayers, UnitChoice::kLinears, UnitChoice::kWhole})
    add([&](TrainingChoice& other) { other.units = units; });
  for (const int prefetch : {0, 1, 2}) add([&](TrainingChoice& other) { other.prefetch = prefetch; });
  const auto of_copy = [&](int ranks) {
    add([&](TrainingChoice& other) {
      other.ranks_per_copy = ranks;
      other.ranks_per_secondary_copy = 0;
    });
  };
  of_copy(0);
  for (int ranks = machines.ranks_per_host; ranks > 1; ranks /= 2)
    if (machines.ranks_per_host % ranks == 0 && machines.ranks % ranks == 0 && ranks < machines.ranks) of_copy(ranks);
  // If each model copy spans all hosts, also tries a secondary copy within each host.
  if (choice.reshard_after_forward && choice.ranks_per_copy == 0 && machines.ranks_per_host > 1 &&
      machines.ranks_per_host < machines.ranks && machines.ranks % machines.ranks_per_host == 0)
    for (const int ranks : {0, machines.ranks_per_host})
      add([&](TrainingChoice& other) { other.ranks_per_secondary_copy = ranks; });
  return all;
}

}  // namespace

std::vector<PlannedTraining> search_plans(const PlannedModel& model, const Machines& machines) {
  std::vector<PlannedTraining> plans;
  const auto try_one = [&](const TrainingChoice& choice) {
    if (std::ranges::none_of(plans, [&](const auto& plan) { return plan.choice == choice; }))
      plans.push_back(plan_training(model, choice, machines));
  };
  for (const TrainingChoice& choice : training_choices()) try_one(choice);
  if (recommended(plans, machines) < 0)
    for (TrainingChoice choice : training_choices()) {
      choice.offload = choice.stage > 0;
      try_one(choice);
    }
  for (TrainingChoice at, before{.stage = -1};; before = at) {
    at = plans[static_cast<size_t>(by_preference(plans, machines).front())].choice;
    if (at == before) return plans;
    for (const TrainingChoice& choice : neighbours(at, machines)) try_one(choice);
  }
}

}  // namespace tessera::internal
