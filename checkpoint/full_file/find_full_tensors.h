#pragma once

#include <filesystem>

#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// Lists the tensors at `path`, which may be a safetensors file, an index or a directory, with their positions in files.
// Throws CheckpointError on failure. Not collective.
SavedTensors find_full_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
