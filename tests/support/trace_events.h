#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/temporary_folder.h"

namespace tessera::testing_support {
using namespace internal;

// The events of a file that TESSERA_TRACE has made: with the bracket that the format leaves to the reader, it has to
// be JSON.
inline nlohmann::json trace_events(const std::filesystem::path& path) {
  return nlohmann::json::parse(file_bytes(path) + "]");
}

}  // namespace tessera::testing_support
