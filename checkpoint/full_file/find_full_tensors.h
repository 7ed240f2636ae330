#pragma once

#include <filesystem>

#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// Lists the tensors of a safetensors file, an index or a directory, with their positions in files. Not collective.
// Throws CheckpointError.
SavedTensors find_full_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
