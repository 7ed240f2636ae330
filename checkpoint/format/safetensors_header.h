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

// Returns the name of a dtype in safetensors files ("F32", "BF16", "I64", "BOOL", ...), or nullopt if there is none.
std::optional<std::string> safetensors_name(at::ScalarType dtype);
// Parses the field "dtype" of a JSON object. Throws CheckpointError for an unknown dtype.
at::ScalarType dtype_field(const JsonObject& fields);

// Returns the bytes of a tensor with these sizes, or nullopt if the bytes, without dimensions of size 0, exceed 2^62.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype);

// Throws std::invalid_argument if safetensors files do not support the dtype. The error text names `tensor`.
void check_dtype(const std::string& tensor, at::ScalarType dtype);

bool is_utf8(const std::string& text);

// Throws CheckpointError if a name is empty, is "__metadata__" or has more than 4096 bytes. Also throws if the name is
// not UTF-8 or has control characters.
void check_tensor_name(const std::string& name, const std::string& where);

struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // position of the first byte in the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // sorted by the position of their data
  std::map<std::string, std::string> metadata;  // content of the member "__metadata__"
  int64_t header_bytes = 0;                     // number of bytes before the data: length, JSON and padding
};

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // equals the limit of the safetensors library

// Parses the JSON `text` of a file's header. The file has file_bytes bytes. Checks that byte counts match shapes, and
// that the tensors fill the rest of the file without overlaps or holes. Throws CheckpointError; `where` names the file.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_bytes, const std::string& where);

// Reads the bytes before the data (length, JSON and padding). Throws CheckpointError if the stored length is invalid.
std::string read_header_bytes(const InputFile& file);
SafetensorsHeader read_safetensors_header(const InputFile& file);

// Returns the header (length, JSON and padding) of a file that stores these entries in this order. The size of the
// header is a multiple of 64 bytes. Sets `begin` and `bytes` of each entry.
std::string format_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata);

}  // namespace tessera::internal
