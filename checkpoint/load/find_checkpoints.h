#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"

namespace tessera::internal {

// Checkpoints by where they are, on any storage.

bool is_checkpoint(const std::filesystem::path& path);
// The entries of a folder that have a manifest, whatever is in it; a symbolic link to one does not count. This and the
// next throw StorageUnavailable where it cannot be told what is there.
std::vector<std::filesystem::path> checkpoints_in(const std::filesystem::path& folder);

// The same by what their manifests are: whole, the oldest first, or not what was written, so that nobody knows when. A
// folder that only has a file of that name, among others of somebody else's, is neither.
struct FoundCheckpoints {
  std::vector<std::filesystem::path> whole, damaged;
};
FoundCheckpoints find_checkpoints(const std::filesystem::path& folder);
// Of a folder in which none was found. Throws CheckpointError where it is a checkpoint itself: whoever asked for the
// newest in it would begin anew.
void require_no_checkpoint(const std::filesystem::path& folder);

// The name of a save's folder in a remote checkpoint (its id), without the '/' that it is listed with; "" for anything
// else.
std::string save_folder(const std::string& listed);
// Whether what a checkpoint's directory lists was written by saves, or left by NFS of such: all else is the user's own.
bool is_of_save(const std::string& listed);
// Whether a directory has a manifest and, beside it, only what a checkpoint consists of.
bool holds_nothing_else(const std::filesystem::path& checkpoint);

// The text of the manifest in a directory. Throws CheckpointError that says what is there instead if there is none.
std::string read_manifest_text(const std::filesystem::path& directory);
// Reads and checks it.
Manifest read_manifest(const std::filesystem::path& directory);
// The same of a text that is there already.
Manifest manifest_of(const std::string& text, const std::filesystem::path& directory);

// The sequence number, reading the first lines of the file only; nothing if that is not a manifest.
std::optional<int64_t> peek_sequence(const std::filesystem::path& directory);

}  // namespace tessera::internal
