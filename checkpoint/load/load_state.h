#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/options.h>
#include <tessera/checkpoint/stateful.h>
#include <tessera/model/model_shards.h>
#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// Loads a checkpoint's state into the model, the optimizer (may be null) and the Stateful objects. Reads and verifies
// this rank's part into host memory, and copies it into place once all ranks have; changes nothing before. Collective.
// Throws CheckpointError on all ranks that starts with `what` and lists all mismatches or read errors.
void load_state(const Manifest& manifest, ModelShards& model, torch::optim::Optimizer* optimizer,
                const std::vector<std::shared_ptr<Stateful>>& beside, const LoadOptions& options,
                const std::string& what);

}  // namespace tessera::internal
