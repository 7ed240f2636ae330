#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/temporary_folder.h"

namespace tessera::testing_support {

// Returns the events of a file written by TESSERA_TRACE. Every such file must be JSON.
inline nlohmann::json trace_events(const std::filesystem::path& path) {
  return nlohmann::json::parse(file_bytes(path));
}

}  // namespace tessera::testing_support
