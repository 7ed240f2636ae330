#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::internal {

// Fields of the JSON in an archive, which may be damaged or hostile: each is looked for, and is of the type that its
// reader expects, or ExportedError says which is not. Fields that nobody asks for are left alone: a newer minor version
// of the schema (torch/_export/serde/schema.py) may have more.

const nlohmann::json& field(const nlohmann::json& object, const char* name);
const nlohmann::json& list_field(const nlohmann::json& object, const char* name);
const nlohmann::json& object_field(const nlohmann::json& object, const char* name);
std::string text_field(const nlohmann::json& object, const char* name);
int64_t int_field(const nlohmann::json& object, const char* name);
bool bool_field(const nlohmann::json& object, const char* name);

// Parses a member of an archive; `where` begins messages.
nlohmann::json parse_archive_json(std::string_view text, const std::string& where);

// The value itself.
int64_t int_of(const nlohmann::json& value);
bool bool_of(const nlohmann::json& value);
double double_of(const nlohmann::json& value);  // "Infinity", "-Infinity" and "NaN" too
std::string text_of(const nlohmann::json& value);

// A union of the schema is an object of one field, whose name is the kind: {"as_int": 3}.
struct Alternative {
  const std::string& kind;
  const nlohmann::json& value;
};
Alternative alternative_of(const nlohmann::json& value);

// torch.export has enumerations of its own for these. A layout's or memory format's is returned as libtorch's number.
at::ScalarType dtype_of_export(const nlohmann::json& value);
int64_t layout_of_export(const nlohmann::json& value);
int64_t memory_format_of_export(const nlohmann::json& value);

}  // namespace tessera::internal
