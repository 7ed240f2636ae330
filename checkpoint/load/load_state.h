#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint_options.h>
#include <tessera/model_shards.h>
#include <tessera/stateful.h>
#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// Compares what is saved with the model, the optimizer (may be null) and what is beside them, reads and verifies this
// rank's part of it into host memory, and, when all ranks have, puts it in place; before that nothing is changed.
// Collective. Throws on all ranks, `what` first: CheckpointError that lists all that does not fit, or what cannot be
// read.
void load_state(const Manifest& manifest, ModelShards& model, torch::optim::Optimizer* optimizer,
                const std::vector<std::shared_ptr<Stateful>>& beside, const LoadOptions& options,
                const std::string& what);

}  // namespace tessera::internal
