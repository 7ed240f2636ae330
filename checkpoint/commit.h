#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"

namespace tessera {

// How a directory becomes a checkpoint all at once (FORMAT.md, "How a checkpoint comes to be"). What
// rank 0 does; nothing here is collective. Everything throws CheckpointError.

// A temporary directory beside the target. Its lock says that somebody is at work on it.
class PartialCheckpoint {
 public:
  // Makes it, with the target's parents, and clears away what dead saves of this target left.
  // Refuses a target that exists and is not a checkpoint, or an empty directory.
  explicit PartialCheckpoint(const std::filesystem::path& target);
  // Removes what was not committed.
  ~PartialCheckpoint();
  PartialCheckpoint(const PartialCheckpoint&) = delete;
  PartialCheckpoint& operator=(const PartialCheckpoint&) = delete;

  const std::filesystem::path& path() const { return path_; }
  uint64_t id() const { return id_; }

  // Checks that the manifest's slices are the whole of every tensor, writes it, and makes the
  // directory the target in one step. Sets the manifest's id and sequence. A checkpoint that was
  // there before is removed by the destructor.
  void commit(Manifest manifest);

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  uint64_t id_ = 0;
  int lock_ = -1;
};

// The complete checkpoints in a folder, oldest first.
std::vector<std::filesystem::path> complete_checkpoints(const std::filesystem::path& folder);

// Removes all but the newest `keep` complete checkpoints of the folder, and what dead saves left.
void remove_old_checkpoints(const std::filesystem::path& folder, int keep);

}  // namespace tessera
