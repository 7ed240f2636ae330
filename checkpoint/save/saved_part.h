#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// Describes the files that one rank, a subgroup or all ranks wrote. Ranks exchange the description as text. Merges runs
// of ranks, so the text for many ranks is hardly longer than the text for one rank. A value type.
class SavedPart {
 public:
  explicit SavedPart(int64_t world_size);

  // Adds this rank's files and optimizers. The optimizers of two ranks may differ only in `numbers`.
  void set(SavedTensors saved, const SavedOptimizers& optimizers);
  // Adds `text`, which text() returned on other ranks. `who` names these ranks in errors. Throws CheckpointError if
  // ranks differ in tensor shapes or dtypes, in optimizer groups or options, or in a number that both ranks have.
  void add(const std::string& text, const std::string& who);

  std::string text() const;

  // Returns the manifest. Must be called after all ranks were added. `optimizers` must be rank 0's optimizers. The
  // caller must set the manifest's other fields, such as id, sequence and extra.
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
