#include "exported/archive/fields.h"

#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <limits>

#include <tessera/errors.h>
#include "checkpoint/format/checked_json.h"

namespace tessera::internal {

using nlohmann::json;

namespace {

// Exceeds kMaxJsonDepth of checkpoints, because the JSON of nested graphs is deep.
constexpr int kMaxArchiveDepth = 400;

[[noreturn]] void refuse_field(const char* name, const std::string& reason) {
  throw ExportedError("the field '" + std::string(name) + "' " + reason);
}

template <class Value>
Value converted_field(const json& object, const char* name, Value (*convert)(const json&)) {
  const json& value = field(object, name);
  try {
    return convert(value);
  } catch (const ExportedError& error) {
    refuse_field(name, std::string("is ") + value.type_name() + ": " + error.what());
  }
}

}  // namespace

const json& field(const json& object, const char* name) {
  if (!object.is_object()) refuse_field(name, "is asked of something that is no object");
  const auto found = object.find(name);
  if (found == object.end()) refuse_field(name, "is missing");
  return *found;
}

const json& list_field(const json& object, const char* name) {
  const json& value = field(object, name);
  if (!value.is_array()) refuse_field(name, "is not a list");
  return value;
}

const json& object_field(const json& object, const char* name) {
  const json& value = field(object, name);
  if (!value.is_object()) refuse_field(name, "is not an object");
  return value;
}

std::string text_field(const json& object, const char* name) { return converted_field(object, name, text_of); }
int64_t int_field(const json& object, const char* name) { return converted_field(object, name, int_of); }
bool bool_field(const json& object, const char* name) { return converted_field(object, name, bool_of); }

json parse_archive_json(std::string_view text, const std::string& where) {
  try {
    return parse_json(text, where, kMaxArchiveDepth);
  } catch (const CheckpointError& error) {
    throw ExportedError(error.what());
  }
}

int64_t int_of(const json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    throw ExportedError("the number " + value.dump() + " does not fit into 64 bit");
  if (!value.is_number_integer()) throw ExportedError("an integer was expected");
  return value.get<int64_t>();
}

bool bool_of(const json& value) {
  if (!value.is_boolean()) throw ExportedError("true or false was expected");
  return value.get<bool>();
}

double double_of(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  throw ExportedError("a number was expected");
}

std::string text_of(const json& value) {
  if (!value.is_string()) throw ExportedError("a text was expected");
  return value.get<std::string>();
}

std::vector<std::string> texts_of(const json& list) {
  std::vector<std::string> texts;
  for (const json& text : list) texts.push_back(text_of(text));
  return texts;
}

Alternative alternative_of(const json& value) {
  if (!value.is_object() || value.size() != 1) throw ExportedError("an object of one field, its kind, was expected");
  return {value.begin().key(), value.begin().value()};
}

at::ScalarType dtype_of_export(const json& value) {
  static constexpr at::ScalarType kFrom1[] = {
      at::kByte,   at::kChar,        at::kShort,        at::kInt,           at::kLong, at::kHalf,    at::kFloat,
      at::kDouble, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble, at::kBool, at::kBFloat16};
  static constexpr at::ScalarType kFrom28[] = {at::kUInt16, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz,
                                               at::kFloat8_e5m2fnuz};
  const int64_t number = int_of(value);
  if (number >= 1 && number <= 13) return kFrom1[number - 1];
  if (number >= 28 && number <= 32) return kFrom28[number - 28];
  throw ExportedError("there is no dtype " + value.dump());
}

int64_t layout_of_export(const json& value) {
  static constexpr at::Layout kLayouts[] = {at::kSparse,    at::kSparseCsr, at::kSparseCsc, at::kSparseBsr,
                                            at::kSparseBsc, at::kMkldnn,    at::kStrided};
  const int64_t number = int_of(value);
  if (number < 1 || number > 7) throw ExportedError("there is no layout " + value.dump());
  return static_cast<int64_t>(kLayouts[number - 1]);
}

int64_t memory_format_of_export(const json& value) {
  static constexpr at::MemoryFormat kFormats[] = {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
                                                  at::MemoryFormat::ChannelsLast3d, at::MemoryFormat::Preserve};
  const int64_t number = int_of(value);
  if (number < 1 || number > 4) throw ExportedError("there is no memory format " + value.dump());
  return static_cast<int64_t>(kFormats[number - 1]);
}

}  // namespace tessera::internal
