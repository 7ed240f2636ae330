#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// Checked access to the JSON of an archive, which may be damaged or hostile. If a field is missing or has another type,
// these functions throw ExportedError with its name. They ignore unknown fields, because a newer minor version of the
// schema (torch/_export/serde/schema.py) may add fields.

const nlohmann::json& field(const nlohmann::json& object, const char* name);
const nlohmann::json& list_field(const nlohmann::json& object, const char* name);
const nlohmann::json& object_field(const nlohmann::json& object, const char* name);
std::string text_field(const nlohmann::json& object, const char* name);
int64_t int_field(const nlohmann::json& object, const char* name);
bool bool_field(const nlohmann::json& object, const char* name);

// Parses the JSON text of an archive's member. On failure, throws ExportedError with a text that starts with `where`.
nlohmann::json parse_archive_json(std::string_view text, const std::string& where);

// Convert a JSON value. Throw ExportedError if the value has another type.
int64_t int_of(const nlohmann::json& value);
bool bool_of(const nlohmann::json& value);
double double_of(const nlohmann::json& value);  // also accepts "Infinity", "-Infinity" and "NaN"
std::string text_of(const nlohmann::json& value);
std::vector<std::string> texts_of(const nlohmann::json& list);

// A union of the schema. In JSON, a union is an object with one field, whose name is the kind: {"as_int": 3}.
struct Alternative {
  const std::string& kind;
  const nlohmann::json& value;
};
Alternative alternative_of(const nlohmann::json& value);

// Convert values of torch.export's enumerations to libtorch's. Layouts and memory formats are returned as integers.
at::ScalarType dtype_of_export(const nlohmann::json& value);
int64_t layout_of_export(const nlohmann::json& value);
int64_t memory_format_of_export(const nlohmann::json& value);

}  // namespace tessera::internal
