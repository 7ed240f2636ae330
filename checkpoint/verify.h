#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/shard_writer.h"

namespace tessera {

// Reads all of a checkpoint and compares it with its manifest: sizes, headers, the place of every
// slice, every checksum, files too many. Returns what is wrong, a line each; none: it is sound.
// Throws CheckpointError if the manifest itself is damaged or not there. Not collective.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, const Progress& progress = {});

}  // namespace tessera
