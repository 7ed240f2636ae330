#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/stateful.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/saved_tensors.h"
#include "optim/state/optimizer_state.h"

namespace tessera::internal {

constexpr char kManifestName[] = "tessera.json";
constexpr int kFormatVersion = 2;  // that is written; 1 is read too
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
  std::map<std::string, std::map<std::string, int64_t>> numbers;  // by parameter: {"step", 7}
};

using GeneratorStates = std::map<std::string, std::string>;  // by device type: "cpu" -> bytes

// tessera.json as a value: see FORMAT.md.
struct Manifest {
  int64_t sequence = 0;
  uint64_t id = 0;
  int world_size = 1;
  SavedTensors saved;
  std::optional<SavedOptimizer> optimizer;
  std::vector<GeneratorStates> rng;  // by rank, of version 1
  nlohmann::json extra = nlohmann::json::object();
  std::string folder;                         // of the ranks' files, in the checkpoint's; "": that itself
  std::map<std::string, StateValues> beside;  // the values of Stateful things, by state_name()
};

// Whether that may be the number of bytes that a checksum covers: whole elements of any dtype.
bool is_block_bytes(int64_t bytes);

// The text of the file, and back. parse checks everything that can be known without the other files and throws
// CheckpointError, which begins with `where`; saved.directory is left empty.
std::string format_manifest(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& where);

// The sequence number of a manifest's text that is what was written, or a later version's; else nothing.
std::optional<int64_t> sequence_of(std::string_view text);

// The parts, some of which are also what ranks tell rank 0 of what they wrote. Reading checks names, nothing else.
nlohmann::json tensors_to_json(const SavedTensors& saved);
void tensors_from_json(const nlohmann::json& tensors, const std::string& where, SavedTensors& saved);
nlohmann::json optimizer_to_json(const SavedOptimizer& optimizer);
nlohmann::json generators_to_json(const GeneratorStates& states);
GeneratorStates generators_from_json(const nlohmann::json& value, const std::string& where);

// Checksums of blocks as one text, 16 hex digits each, and back.
std::string checksums_to_hex(const std::vector<uint64_t>& checksums);
std::vector<uint64_t> checksums_from_hex(const std::string& text, const std::string& where);

}  // namespace tessera::internal
