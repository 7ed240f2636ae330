#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/options.h"
#include "tessera/flat/model_shards.h"

namespace tessera {

// What this rank read, verified, in host memory, and how it is put in place.
struct LoadedState {
  std::vector<std::function<void()>> steps;
  int64_t bytes_read = 0;
  void apply() const {
    for (const auto& step : steps) step();
  }
};

// Compares the checkpoint with the model and the optimizer (may be null) and reads this rank's part
// of it; changes nothing. Not collective. Throws CheckpointError that lists all that does not fit.
LoadedState read_state_of(const Manifest& manifest, ModelShards& model, const std::vector<NamedShard>& shards,
                          torch::optim::Optimizer* optimizer, const LoadOptions& options);

// Why a directory has no manifest: it is not there, is empty, holds checkpoints, other files, ...
std::string explain_missing(const std::filesystem::path& directory);

}  // namespace tessera
