#pragma once

#include <filesystem>

#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// Lists the tensors of a safetensors file, of an index or of a directory, with their positions in files. Throws
// CheckpointError on failure. Not collective.
SavedTensors find_full_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
