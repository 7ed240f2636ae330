#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// Functions that find and identify checkpoints on any storage.

bool is_checkpoint(const std::filesystem::path& path);
// Returns the subfolders of a folder that have a manifest, damaged or not, except hidden ones and symbolic links. Like
// find_checkpoints(), throws StorageUnavailable if the storage cannot list the folder.
std::vector<std::filesystem::path> checkpoints_in(const std::filesystem::path& folder);

// The checkpoints of a folder. `whole` has those with a valid manifest, the oldest first. `damaged` has those with a
// damaged manifest, whose age is unknown. Omits folders with an unrelated tessera.json among other files.
struct FoundCheckpoints {
  std::vector<std::filesystem::path> whole, damaged;
  std::vector<int64_t> sequences;  // sequence number of each checkpoint in `whole`
};
// Other jobs may meanwhile save to the folder and remove old checkpoints. If the folder has a whole checkpoint at every
// moment, finds at least one.
FoundCheckpoints find_checkpoints(const std::filesystem::path& folder);
// Throws CheckpointError if the path is itself a checkpoint, a file or a dangling link. Must be called if no checkpoint
// was found, because a wrong path would otherwise restart the training.
void require_folder_of_checkpoints(const std::filesystem::path& folder);

// If `listed` names the data folder of a save in a remote checkpoint (16 hex digits, the save's id, and '/'), returns
// the name without '/'. Otherwise returns "".
std::string save_folder(const std::string& listed);
// Returns whether a save wrote the file of this name in a checkpoint's directory, or the file is an NFS leftover of
// such a file. All other files are the user's.
bool is_of_save(const std::string& listed);
// Returns whether a folder has rank files, or data folders of remote saves.
bool has_rank_files(const std::filesystem::path& folder);
// Returns whether a directory has a manifest and otherwise only files of a checkpoint.
bool holds_nothing_else(const std::filesystem::path& checkpoint);

// Returns the text of a directory's manifest. If there is none, throws CheckpointError that describes the content.
std::string read_manifest_text(const std::filesystem::path& directory);
// Reads and checks a directory's manifest.
Manifest read_manifest(const std::filesystem::path& directory);
// Like read_manifest(), for the text that read_manifest_text() returned.
Manifest manifest_of(const std::string& text, const std::filesystem::path& directory);

// Returns the sequence number from the first lines of the manifest, which is not checked; nullopt if there is none.
std::optional<int64_t> peek_sequence(const std::filesystem::path& directory);

}  // namespace tessera::internal
