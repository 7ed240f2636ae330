#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::testing_support {

// The events of a file that TESSERA_TRACE has made: with the bracket that the format leaves to the reader, it has to
// be JSON.
inline nlohmann::json trace_events(const std::filesystem::path& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(std::string(std::istreambuf_iterator<char>(file), {}) + "]");
}

}  // namespace tessera::testing_support
