#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// A description of the files that one rank, a subgroup or all ranks wrote, in the form that ranks exchange. Merges the
// runs of ranks, so the text is hardly longer for many ranks. A value type.
class SavedPart {
 public:
  explicit SavedPart(int64_t world_size);

  // Adds the files that this rank wrote, and its optimizers. The optimizers of ranks may differ only in `numbers`.
  void set(SavedTensors saved, const SavedOptimizers& optimizers);
  // Adds the description `text` of other ranks, which error texts call `who`. Throws CheckpointError if ranks differ in
  // a tensor's shape or dtype, in an optimizer's groups or options, or in a number that both have.
  void add(const std::string& text, const std::string& who);

  std::string text() const;

  // Returns the manifest. Must be called after all ranks were added. `optimizers` must be those of rank 0. The caller
  // must set the other fields, such as id, sequence and extra.
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
