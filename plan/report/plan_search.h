#pragma once

#include <vector>

#include <tessera/plan/memory_plan.h>

namespace tessera::internal {

// Searches for the best choice of stage, units, copy sizes, prefetching, resharding, precision, checkpointing and
// offload. Starts with training_choices(). If none of these fits, also tries them with offload. Then tries choices that
// differ from the best choice in one option other than the stage, until the best choice stays the same. If no choice
// fits, the choice with the smallest peak is the best. Returns all tried plans. Throws like plan_training().
std::vector<PlannedTraining> search_plans(const PlannedModel& model, const Machines& machines);

}  // namespace tessera::internal
