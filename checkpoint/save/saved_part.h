#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// The description of files written by some ranks (one, a subgroup or all), in the form that ranks exchange. Runs of
// ranks are merged, so the size hardly grows with the number of ranks. A value type.
class SavedPart {
 public:
  explicit SavedPart(int64_t world_size);

  // Sets the files that this rank wrote, and its optimizers. Ranks' optimizers may differ only in `numbers`.
  void set(SavedTensors saved, const SavedOptimizers& optimizers);
  // Adds the description `text` of other ranks. Throws CheckpointError, naming `who`, if ranks differ in the form of a
  // tensor, the groups or options of an optimizer, or a number that both have.
  void add(const std::string& text, const std::string& who);

  std::string text() const;

  // Returns the manifest once all ranks were added. The caller sets id, sequence, rng and extra. `optimizers` must be
  // rank 0's.
  Manifest manifest(SavedOptimizers optimizers) &&;

 private:
  using Numbers = std::map<std::string, std::map<std::string, int64_t>>;
  void add(SavedTensors saved, const std::optional<std::string>& optimizer, const Numbers& numbers,
           const std::string& who);

  SavedTensors saved_;
  bool has_any_ = false;
  std::optional<std::string> optimizer_;  // fingerprint of the optimizers' kinds, groups and options
  Numbers numbers_;
};

}  // namespace tessera::internal
