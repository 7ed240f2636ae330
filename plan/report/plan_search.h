#pragma once

#include <vector>

#include <tessera/plan/memory_plan.h>

namespace tessera::internal {

// Searches all stages, units, copy sizes, prefetching, resharding, precisions, checkpointing and offload for the choice
// that a plan would recommend. Starts with training_choices(), and with offload if none of them fits. Then tries the
// choices that differ from the best one (while none fits, from the smallest) in one option, until none is better. This
// takes tens of dry runs instead of hundreds. Returns all tried plans. Throws like PlannedModel::run().
std::vector<PlannedTraining> search_plans(const PlannedModel& model, const Machines& machines);

}  // namespace tessera::internal
