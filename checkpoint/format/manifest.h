#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/checkpoint/stateful.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/saved_tensors.h"
#include "optim/state/optimizer_state.h"

namespace tessera::internal {

constexpr char kManifestName[] = "tessera.json";
constexpr int kFormatVersion = 2;  // The version written; version 1 can be read too.
constexpr int kMaxExtraDepth = 32;
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

struct SavedGroup {
  OptionList options;
  std::vector<std::string> parameters;
};

// An optimizer without its tensors.
struct SavedOptimizer {
  std::string kind;
  std::vector<SavedGroup> groups;
  std::map<std::string, std::map<std::string, int64_t>> numbers;  // by parameter: {"step", 7}
};

using SavedOptimizers = std::map<std::string, SavedOptimizer>;  // by name, which is "" for an optimizer without a name

using GeneratorStates = std::map<std::string, std::string>;  // by device type: "cpu" -> bytes

// The content of tessera.json: see FORMAT.md.
struct Manifest {
  int64_t sequence = 0;
  uint64_t id = 0;
  int world_size = 1;
  SavedTensors saved;
  SavedOptimizers optimizers;
  std::vector<std::string> models;   // their names, the prefixes of tensor names; empty: one model without a name
  std::vector<GeneratorStates> rng;  // by rank; version 1 only
  nlohmann::json extra = nlohmann::json::object();
  std::string folder;                         // subfolder with the ranks' files; "": the checkpoint itself
  std::map<std::string, StateValues> beside;  // the values of Stateful objects, by state_name()
};

// Returns why no optimizer can have this option (not finite, or a negative learning rate, for example), or "".
std::string why_not_an_option(const std::string& name, const OptimizerOption& option);

// Returns whether a checksum may cover this many bytes: a multiple of every dtype's element size, within limits.
bool is_block_bytes(int64_t bytes);

// Convert to and from the file's text. parse_manifest() checks everything that needs no other file, throws
// CheckpointError that starts with `where`, and leaves saved.directory empty. The tensors of one rank's part need not
// be whole (`is_part`).
std::string format_manifest(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& where, bool is_part = false);

// Returns the sequence number if the text is an intact manifest of this or a later version.
std::optional<int64_t> sequence_of(std::string_view text);

// Convert parts of the manifest. Ranks also send such parts to rank 0, to report the files that they wrote. Reading
// checks each entry, but not that slices cover their tensor.
nlohmann::json tensors_to_json(const SavedTensors& saved);
void tensors_from_json(const nlohmann::json& tensors, const std::string& where, SavedTensors& saved);
nlohmann::json optimizer_to_json(const SavedOptimizer& optimizer);
nlohmann::json optimizers_to_json(const SavedOptimizers& optimizers);  // null if there is none
nlohmann::json generators_to_json(const GeneratorStates& states);
GeneratorStates generators_from_json(const nlohmann::json& value, const std::string& where);

// Block checksums as one text, 16 hex digits each.
std::string checksums_to_hex(const std::vector<uint64_t>& checksums);
std::vector<uint64_t> checksums_from_hex(const std::string& text, const std::string& where);

}  // namespace tessera::internal
