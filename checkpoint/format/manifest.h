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
constexpr int kFormatVersion = 2;  // the newest version; version 1 can be read too
constexpr int kMaxExtraDepth = 32;
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

struct SavedGroup {
  OptionList options;
  std::vector<std::string> parameters;
};

// An optimizer's kind, groups and numbers, without its tensors.
struct SavedOptimizer {
  std::string kind;
  std::vector<SavedGroup> groups;
  std::map<std::string, std::map<std::string, int64_t>> numbers;  // by parameter, then by key: {"step", 7}
};

using SavedOptimizers = std::map<std::string, SavedOptimizer>;  // by name, which is "" for an optimizer without a name

using GeneratorStates = std::map<std::string, std::string>;  // by device type, such as "cpu": the bytes of its state

// The content of tessera.json: see FORMAT.md.
struct Manifest {
  int64_t sequence = 0;
  uint64_t id = 0;
  int world_size = 1;
  SavedTensors saved;
  SavedOptimizers optimizers;
  std::vector<std::string> models;   // names of models, with which tensor names begin; empty: one model, unnamed
  std::vector<GeneratorStates> rng;  // random generator states by rank; only in version 1
  nlohmann::json extra = nlohmann::json::object();
  std::string folder;                         // subfolder that has the ranks' files; "": the checkpoint itself
  std::map<std::string, StateValues> beside;  // values of Stateful objects, by state_name()
};

// Returns the reason that an option is invalid, such as "is not finite", or "" if the option is valid.
std::string why_not_an_option(const std::string& name, const OptimizerOption& option);

// Returns whether one checksum may cover this many bytes: a multiple of 16 (so of every element size), up to 1 GiB.
bool is_block_bytes(int64_t bytes);

// Convert a manifest to and from the text of tessera.json. parse_manifest() makes all checks that need no other file.
// Its CheckpointErrors start with `where`, and it leaves saved.directory empty. If `is_part`, the text describes one
// rank's part, whose tensors may lack elements.
std::string format_manifest(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& where, bool is_part = false);

// Returns the sequence number if the text is an intact manifest, or any manifest of a later version; else nullopt.
std::optional<int64_t> sequence_of(std::string_view text);

// Convert parts of the manifest. SavedPart uses these functions, too, to describe the files that some ranks wrote. The
// functions that read JSON check each entry, but not that slices cover their tensor.
nlohmann::json tensors_to_json(const SavedTensors& saved);
void tensors_from_json(const nlohmann::json& tensors, const std::string& where, SavedTensors& saved);
nlohmann::json optimizer_to_json(const SavedOptimizer& optimizer);
nlohmann::json optimizers_to_json(const SavedOptimizers& optimizers);  // JSON null if there are no optimizers
nlohmann::json generators_to_json(const GeneratorStates& states);
GeneratorStates generators_from_json(const nlohmann::json& value, const std::string& where);

// Convert block checksums to and from one text, 16 hex digits each. Invalid texts throw CheckpointError.
std::string checksums_to_hex(const std::vector<uint64_t>& checksums);
std::vector<uint64_t> checksums_from_hex(const std::string& text, const std::string& where);

}  // namespace tessera::internal
