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
constexpr int kFormatVersion = 2;  // the version that is written; version 1 is still readable
constexpr int kMaxExtraDepth = 32;
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

struct SavedGroup {
  OptionList options;
  std::vector<std::string> parameters;
};

// An optimizer's algorithm, groups, and numbers such as step counts, without its state tensors.
struct SavedOptimizer {
  std::string kind;
  std::vector<SavedGroup> groups;
  std::map<std::string, std::map<std::string, int64_t>> numbers;  // from parameter name and key ("step") to number
};

using SavedOptimizers = std::map<std::string, SavedOptimizer>;  // the key is the optimizer's name, or "" if unnamed

using GeneratorStates = std::map<std::string, std::string>;  // from device types ("cpu") to generator states

// The content of a checkpoint's tessera.json, which FORMAT.md describes.
struct Manifest {
  int64_t sequence = 0;
  uint64_t id = 0;
  int world_size = 1;
  SavedTensors saved;
  SavedOptimizers optimizers;
  std::vector<std::string> models;   // model names, the prefixes of tensor names; empty for one unnamed model
  std::vector<GeneratorStates> rng;  // random generator states of each rank; used in version 1 only
  nlohmann::json extra = nlohmann::json::object();
  std::string folder;                         // subfolder with the rank files; "" if they are not in a subfolder
  std::map<std::string, StateValues> beside;  // values of each Stateful object; the key is its state_name()
};

// Returns the reason why an option is invalid, such as "is not finite", or "" if the option is valid.
std::string why_not_an_option(const std::string& name, const OptimizerOption& option);

// Returns whether the number is a valid block size: a multiple of 16 (and so of every element size) up to 1 GiB.
bool is_block_bytes(int64_t bytes);

// Convert a manifest to and from the text of tessera.json. format_manifest() writes version 2, so saved.by_rank must be
// true. parse_manifest() makes all checks that need no other file, and leaves saved.directory empty. Its error texts
// start with `where`. If `is_part` is true, the text may describe only one rank's part of the tensors, so
// parse_manifest() does not call check_saved_tensors().
std::string format_manifest(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& where, bool is_part = false);

// Returns a manifest's sequence number; nullopt for damaged or other text. Does not verify a later version's checksum.
std::optional<int64_t> sequence_of(std::string_view text);

// Convert parts of a manifest to and from JSON. SavedPart also uses these functions, to describe some ranks' files. The
// functions that read JSON check each entry, but do not check that a tensor's slices cover the whole tensor.
nlohmann::json tensors_to_json(const SavedTensors& saved);
void tensors_from_json(const nlohmann::json& tensors, const std::string& where, SavedTensors& saved);
nlohmann::json optimizer_to_json(const SavedOptimizer& optimizer);
nlohmann::json optimizers_to_json(const SavedOptimizers& optimizers);  // returns JSON null for an empty map
nlohmann::json generators_to_json(const GeneratorStates& states);
GeneratorStates generators_from_json(const nlohmann::json& value, const std::string& where);

// Convert checksums to and from a text with 16 hex digits each. Throws CheckpointError for invalid text.
std::string checksums_to_hex(const std::vector<uint64_t>& checksums);
std::vector<uint64_t> checksums_from_hex(const std::string& text, const std::string& where);

}  // namespace tessera::internal
