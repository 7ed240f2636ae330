#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"

namespace tessera {

// Checkpoints by where they are, on any storage.

bool is_checkpoint(const std::filesystem::path& path);
// The complete checkpoints in a folder, oldest first; a symbolic link to one does not count.
std::vector<std::filesystem::path> complete_checkpoints(const std::filesystem::path& folder);

// The text of the manifest in a directory. Throws CheckpointError that says what is there instead if there is none.
std::string read_manifest_text(const std::filesystem::path& directory);
// Reads and checks it.
Manifest read_manifest(const std::filesystem::path& directory);
// The same of a text that is there already.
Manifest manifest_of(const std::string& text, const std::filesystem::path& directory);

// The sequence number, reading the first lines of the file only; nothing if that is not a manifest.
std::optional<int64_t> peek_sequence(const std::filesystem::path& directory);

}  // namespace tessera
