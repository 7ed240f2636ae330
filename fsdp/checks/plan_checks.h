#pragma once

#include <torch/nn/module.h>

#include <vector>

#include <tessera/options/fsdp_options.h>
#include "core/layout/mesh.h"
#include "core/layout/unit_plan.h"
#include "core/model/memory_warning.h"

namespace tessera::internal {

// Checks of a plan, before the module is sharded.

// Throws std::invalid_argument on all ranks, with the first difference, if ranks differ in options, units, parameters,
// buffers or gradients from before wrapping. Collective.
void require_same_plan(const std::vector<PlannedUnit>& plan, const FsdpOptions& options,
                       const torch::nn::Module& module, Communicator& world);

// Returns the bytes that this rank's device will need for shards, gradients and unsharded units.
MemoryNeed memory_need(const std::vector<PlannedUnit>& plan, const FsdpOptions& options, const Mesh& mesh);

// If the module has submodules, warns on rank 0 about each policy that selects no module: probably a mistake.
void warn_of_idle_policies(const std::vector<PlannedUnit>& plan, const FsdpOptions& options,
                           const torch::nn::Module& module, const Communicator& world);

}  // namespace tessera::internal
