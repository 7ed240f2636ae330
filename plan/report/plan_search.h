#pragma once

#include <vector>

#include <tessera/plan/memory_plan.h>

namespace tessera::internal {

// Searches all stages, units, copy sizes, prefetching, resharding, precisions, checkpointing and offload for the best
// choice. Starts with training_choices(); if none fits, also tries them with offload. Then tries the choices that
// differ in one option from the best one (the one with the least peak if none fits), until none is better. This takes
// tens of dry runs instead of hundreds. Returns all tried plans. Throws like PlannedModel::run().
std::vector<PlannedTraining> search_plans(const PlannedModel& model, const Machines& machines);

}  // namespace tessera::internal
