#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// Finds and identifies checkpoints on any storage.

bool is_checkpoint(const std::filesystem::path& path);
// Returns the entries of a folder that have a manifest, damaged or not. Ignores symbolic links. This function and the
// next throw StorageUnavailable if the storage cannot list the folder.
std::vector<std::filesystem::path> checkpoints_in(const std::filesystem::path& folder);

// The checkpoints of a folder: those with a valid manifest, the oldest first, and those with a damaged one, whose age
// is unknown. Leaves out folders with an unrelated tessera.json: no manifest, no rank files, but other files.
struct FoundCheckpoints {
  std::vector<std::filesystem::path> whole, damaged;
  std::vector<int64_t> sequences;  // of `whole`
};
// May run while other jobs save to the folder and remove old checkpoints: finds a whole checkpoint if the folder had
// one at every moment.
FoundCheckpoints find_checkpoints(const std::filesystem::path& folder);
// Throws CheckpointError if the path is itself a checkpoint, a file or a dangling link. Must be called if no checkpoint
// was found, because a wrong path would otherwise restart the training.
void require_folder_of_checkpoints(const std::filesystem::path& folder);

// Returns the name of a save's folder in a remote checkpoint (its id), without the '/' of the listing; "" for any other
// name.
std::string save_folder(const std::string& listed);
// Returns whether a name in a checkpoint's directory is of a file that a save wrote, or of its NFS leftover. All other
// files are the user's.
bool is_of_save(const std::string& listed);
// Returns whether a folder has files that ranks write.
bool has_rank_files(const std::filesystem::path& folder);
// Returns whether a directory has a manifest and otherwise only files of a checkpoint.
bool holds_nothing_else(const std::filesystem::path& checkpoint);

// Returns the text of a directory's manifest. If it has none, throws CheckpointError that describes its content.
std::string read_manifest_text(const std::filesystem::path& directory);
// Reads and checks the manifest.
Manifest read_manifest(const std::filesystem::path& directory);
// Like read_manifest(), for a text that was read already.
Manifest manifest_of(const std::string& text, const std::filesystem::path& directory);

// Returns the sequence number from the first lines of the manifest, or nullopt if it is not a manifest.
std::optional<int64_t> peek_sequence(const std::filesystem::path& directory);

}  // namespace tessera::internal
