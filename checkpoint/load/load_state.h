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

// The objects to save or load: those of a TrainingState, or a model and optimizer that the caller passed directly.
struct StateObjects {
  ModelShards& model;  // one model, or all named models combined
  std::vector<std::string> models{};
  std::map<std::string, torch::optim::Optimizer*> optimizers{};
  std::vector<std::shared_ptr<Stateful>> beside{};
};

// Returns the objects of `state`; borrows it. Throws std::invalid_argument while optimizer averages are swapped in.
StateObjects state_objects_of(const TrainingState& state);

// Returns lines that name the objects. Callers compare the lines over ranks: the lists of objects must be equal.
std::vector<std::string> describe_objects(const StateObjects& state);

// Returns lines with the path and the options of a load, without functions and results. Callers compare them over
// ranks.
std::vector<std::string> describe_load(const std::filesystem::path& path, const LoadOptions& options);

// Loads a checkpoint's state into the objects. Collective. Reads and verifies this rank's part in host memory, and
// changes the objects only after all ranks have read their parts. On a mismatch or a read error, throws CheckpointError
// on all ranks. The error text starts with `what`, and lists the mismatches (at most 100 of a kind).
void load_state(const Manifest& manifest, const StateObjects& objects, const LoadOptions& options,
                const std::string& what);

}  // namespace tessera::internal
