#pragma once

#include <vector>

#include <tessera/plan/memory_plan.h>

namespace tessera::internal {

// Looks for the choice that a plan would recommend among all stages, units, sizes of a copy, prefetching, resharding,
// precisions, checkpointing and offload. Begins with training_choices(), and with offload where none of them fits; then
// tries what differs in one thing from the best so far (the smallest, while none fits), until nothing is better: some
// tens of dry runs in place of hundreds. Returns all that were tried. Throws as PlannedModel::run().
std::vector<PlannedTraining> search_plans(const PlannedModel& model, const Machines& machines);

}  // namespace tessera::internal
