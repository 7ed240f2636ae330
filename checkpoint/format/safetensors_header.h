#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/entries.h"

namespace tessera::internal {

// safetensors' names of dtypes: "F32", "BF16", "I64", "BOOL", ...; nothing for one it has no name for.
std::optional<std::string> safetensors_name(at::ScalarType dtype);
// An object's field "dtype". Throws CheckpointError.
at::ScalarType dtype_field(const JsonObject& fields);

// The bytes of a tensor of these sizes; nothing if that is 2^62 or more.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype);

// Throws std::invalid_argument if safetensors has no name for the dtype of a tensor that is to be written.
void check_dtype(const std::string& tensor, at::ScalarType dtype);

bool is_utf8(const std::string& text);

// Throws CheckpointError for a tensor's name that is empty, "__metadata__", longer than 4096 bytes, has control
// characters or is not UTF-8.
void check_tensor_name(const std::string& name, const std::string& where);

// A tensor of a safetensors file.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // first byte, from the start of the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // in the order of their data
  std::map<std::string, std::string> metadata;  // __metadata__
  int64_t header_bytes = 0;                     // length, JSON and padding: where data begins
};

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // Python's limit too

// The header of a file of file_bytes bytes, of which `text` is the JSON. Checks everything: sizes fit shapes, data is
// in order without overlap or hole and ends with the file. Throws CheckpointError; `where` is the file's name for
// messages.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_bytes, const std::string& where);

// The first bytes of a file, up to where data begins: length, JSON, padding. Throws CheckpointError.
std::string read_header_bytes(const InputFile& file);
// Reads and parses the header of a file.
SafetensorsHeader read_safetensors_header(const InputFile& file);

// The first bytes of a file with these entries, whose `begin` and `bytes` this sets, in their order, up to where data
// begins: a multiple of 64.
std::string format_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata);

}  // namespace tessera::internal
