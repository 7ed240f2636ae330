#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/options.h>
#include <tessera/checkpoint/stateful.h>
#include <tessera/checkpoint/training_state.h>
#include <tessera/model/model_shards.h>
#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// The objects of a TrainingState, or a model and an optimizer that were passed without one.
struct StateObjects {
  ModelShards& model;  // one model, or all named models as one
  std::vector<std::string> models{};
  std::map<std::string, torch::optim::Optimizer*> optimizers{};
  std::vector<std::shared_ptr<Stateful>> beside{};
};

// Throws std::invalid_argument while averages of an optimizer are swapped in. The objects must outlive the result.
StateObjects state_objects_of(const TrainingState& state);

// Loads a checkpoint's state into the objects. Reads this rank's part into host memory and verifies it. Changes the
// objects only after all ranks have read their parts. Collective. On a mismatch or a read error, throws CheckpointError
// on all ranks. Its text starts with `what` and lists all problems.
void load_state(const Manifest& manifest, const StateObjects& objects, const LoadOptions& options,
                const std::string& what);

}  // namespace tessera::internal
