#pragma once

#include <filesystem>

#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// What lies where in such a file, index or directory. Not collective. Throws CheckpointError.
SavedTensors find_full_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
