#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/checkpoint/saved_tensors.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {

constexpr char kManifestName[] = "tessera.json";
constexpr int kFormatVersion = 1;
constexpr int kMaxExtraDepth = 32;
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

struct SavedGroup {
  OptionList options;
  std::vector<std::string> parameters;
};

// An optimizer but for its tensors.
struct SavedOptimizer {
  std::string kind;
  std::vector<SavedGroup> groups;
  std::map<std::string, std::vector<std::pair<std::string, int64_t>>> numbers;  // by parameter: {"step", 7}
};

// tessera.json as a value: see FORMAT.md.
struct Manifest {
  int64_t sequence = 0;
  uint64_t id = 0;
  int world_size = 1;
  SavedTensors saved;
  std::optional<SavedOptimizer> optimizer;
  std::vector<std::map<std::string, std::string>> rng;  // by rank: device type -> bytes
  nlohmann::json extra = nlohmann::json::object();
};

// Whether that may be the number of bytes that a checksum covers: whole elements of any dtype.
bool is_block_bytes(int64_t bytes);

// The text of the file, and back. parse checks everything that can be known without the other
// files and throws CheckpointError, which begins with `where`; saved.directory is left empty.
std::string format_manifest(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& where);

// Reads and checks the manifest of the checkpoint in a directory.
Manifest read_manifest(const std::filesystem::path& directory);

// One line each, what ranks tell rank 0 of what they wrote: the JSON of files and tensors alone.
nlohmann::json files_to_json(const SavedTensors& saved);
nlohmann::json tensors_to_json(const SavedTensors& saved);
// The other way. Names of files are checked, nothing else.
void files_from_json(const nlohmann::json& value, const std::string& where, SavedTensors& saved);
void tensors_from_json(const nlohmann::json& value, const std::string& where, SavedTensors& saved);

// The optimizer's options and numbers, likewise.
nlohmann::json optimizer_to_json(const SavedOptimizer& optimizer);
SavedOptimizer optimizer_from_json(const nlohmann::json& value, const std::string& where);

// The sequence number, reading the first lines of the file only; nothing if that is not a manifest.
std::optional<int64_t> peek_sequence(const std::filesystem::path& directory);

}  // namespace tessera
