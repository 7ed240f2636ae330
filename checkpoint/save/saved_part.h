#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// What some ranks wrote, as one rank tells another: of one rank, of a subgroup, of all. Small: runs of ranks are
// joined, so it grows with the tensors and hardly with the ranks. A value.
class SavedPart {
 public:
  explicit SavedPart(int64_t world_size);

  // This rank's: what it wrote, and its optimizer (may be null), of which only the numbers are its own.
  void set(SavedTensors saved, const SavedOptimizer* optimizer);
  // Adds what others wrote, from their text(). Throws CheckpointError if ranks differ where they must not; `who` is
  // whose text it is.
  void add(const std::string& text, const std::string& who);

  std::string text() const;

  // The whole, once all are in it: checkpoint's id, sequence, rng and extra are the caller's. `optimizer` is rank 0's.
  Manifest manifest(const std::optional<SavedOptimizer>& optimizer) &&;

 private:
  using Numbers = std::map<std::string, std::map<std::string, int64_t>>;
  void add(SavedTensors saved, const std::optional<std::string>& optimizer, const Numbers& numbers,
           const std::string& who);

  SavedTensors saved_;
  bool has_any_ = false;
  std::optional<std::string> optimizer_;  // a fingerprint of its kind, groups and options
  Numbers numbers_;
};

}  // namespace tessera::internal
