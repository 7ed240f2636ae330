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
// Returns the subfolders of `folder` that contain a manifest, which may be damaged. Skips hidden folders and symbolic
// links. Throws StorageUnavailable if the storage cannot list the folder; so does find_checkpoints().
std::vector<std::filesystem::path> checkpoints_in(const std::filesystem::path& folder);

// Returns, for error texts, "; <subfolder> holds checkpoints" if a subfolder of a local folder does; otherwise "".
std::string inner_folder_of_checkpoints(const std::filesystem::path& folder);

// The checkpoints in a folder. `whole` lists the checkpoints with a valid manifest, oldest first. `damaged` lists the
// checkpoints with a damaged manifest. A folder of other files with an unrelated tessera.json is in neither list.
struct FoundCheckpoints {
  std::vector<std::filesystem::path> whole, damaged;
  std::vector<int64_t> sequences;  // sequence number of each checkpoint in `whole`
};
// Finds the checkpoints in a folder. Other jobs may save to the folder and remove old checkpoints during the search.
// The search finds at least one checkpoint if the folder contains a whole checkpoint at every moment.
FoundCheckpoints find_checkpoints(const std::filesystem::path& folder);
// Throws CheckpointError if the path is itself a checkpoint, a file or a dangling link. Must be called if a search
// found no checkpoint, because a wrong path would otherwise silently restart the training from the beginning.
void require_folder_of_checkpoints(const std::filesystem::path& folder);

// If `listed` (an entry of Storage::list()) is a data folder of a remote save, returns the folder's name without the
// last '/'. Otherwise returns "". The name of a data folder is the save's id, in 16 hex digits.
std::string save_folder(const std::string& listed);
// Returns whether an entry of a checkpoint's directory belongs to a save, judged by its name. The temporary files that
// NFS creates for deleted open files (".nfs...") count as a save's files. All other files are the user's.
bool is_of_save(const std::string& listed);
// Returns whether a folder contains rank files, or data folders of remote saves.
bool has_rank_files(const std::filesystem::path& folder);
// Returns whether a directory contains a manifest, and all its other entries belong to saves.
bool holds_nothing_else(const std::filesystem::path& checkpoint);

// Returns the text of a directory's manifest. Throws CheckpointError if the directory has no manifest.
std::string read_manifest_text(const std::filesystem::path& directory);
Manifest read_manifest(const std::filesystem::path& directory);
// Parses and checks a manifest text that read_manifest_text() returned for this directory.
Manifest manifest_of(const std::string& text, const std::filesystem::path& directory);

// Returns the sequence number at the start of the manifest, unverified; nullopt if none. Throws StorageUnavailable.
std::optional<int64_t> peek_sequence(const std::filesystem::path& directory);

}  // namespace tessera::internal
