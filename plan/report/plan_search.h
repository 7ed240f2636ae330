#pragma once

#include <vector>

#include <tessera/plan/memory_plan.h>

namespace tessera::internal {

// Searches all stages, units, copy sizes, prefetching, resharding, precisions, checkpointing and offload for the choice
// that a plan would recommend. Starts with training_choices(), and with offload if none of them fits. Then tries the
// neighbours of the best choice (while none fits, of the smallest) that differ in one option, until none is better:
// some tens of dry runs instead of hundreds. Returns all tried plans. Throws as PlannedModel::run().
std::vector<PlannedTraining> search_plans(const PlannedModel& model, const Machines& machines);

}  // namespace tessera::internal
