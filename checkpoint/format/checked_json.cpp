#include "checkpoint/format/checked_json.h"

#include <algorithm>
#include <set>
#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"

namespace tessera::internal {

using nlohmann::json;

namespace {

bool is_count(const json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{JsonObject::kMost};
}

}  // namespace

json parse_json(std::string_view text, const std::string& where, int max_depth) {
  std::vector<std::set<std::string>> keys;  // of the open objects
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > max_depth)
      throw CheckpointError(where + ": JSON nested deeper than " + std::to_string(max_depth) + " levels");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw CheckpointError(where + ": the key '" + parsed.get<std::string>() + "' occurs twice");
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::exception& error) {
    throw CheckpointError(where + ": not JSON: " + error.what());
  }
}

int json_depth(const json& value, int limit) {
  if (!value.is_structured()) return 0;
  if (limit == 0) return 1;
  int deepest = 0;
  for (const auto& entry : value) deepest = std::max(deepest, json_depth(entry, limit - 1));
  return deepest + 1;
}

JsonObject::JsonObject(const json& value, std::string where, std::initializer_list<const char*> required,
                       std::initializer_list<const char*> optional)
    : value_(value), where_(std::move(where)) {
  if (!value.is_object()) refuse("expected an object");
  for (const char* field : required)
    if (!value.contains(field)) refuse(std::string("the field '") + field + "' is missing");
  auto is_in = [](const auto& fields, const std::string& key) {
    return std::find(fields.begin(), fields.end(), key) != fields.end();
  };
  for (const auto& entry : value.items())
    if (!is_in(required, entry.key()) && !is_in(optional, entry.key()))
      refuse("the field '" + entry.key() + "' is not known");
}

void JsonObject::refuse(const std::string& reason) const { throw CheckpointError(where_ + ": " + reason); }

const json& JsonObject::checked(const char* field, bool fits, const char* expected) const {
  if (!fits) refuse(std::string("'") + field + "' " + expected);
  return at(field);
}

std::string JsonObject::text(const char* field) const {
  return checked(field, at(field).is_string(), "is not a text").get<std::string>();
}
int64_t JsonObject::number(const char* field, int64_t least, int64_t most) const {
  const auto number = checked(field, is_count(at(field)), "is not a number of things").get<int64_t>();
  if (number < least || number > most) refuse(std::string("'") + field + "' is out of range");
  return number;
}
const json& JsonObject::array(const char* field) const { return checked(field, at(field).is_array(), "is not a list"); }
const json& JsonObject::object(const char* field) const {
  return checked(field, at(field).is_object(), "is not an object");
}

uint64_t JsonObject::hex(const char* field) const {
  try {
    return from_hex(text(field));
  } catch (const std::invalid_argument& error) {
    refuse(std::string("'") + field + "': " + error.what());
  }
}

std::vector<int64_t> JsonObject::numbers(const char* field) const {
  const json& all = array(field);
  const bool fits = std::all_of(all.begin(), all.end(), is_count);
  return checked(field, fits, "has an entry that is not a number of things").get<std::vector<int64_t>>();
}

std::vector<std::string> JsonObject::texts(const char* field) const {
  const json& all = array(field);
  const bool fits = std::all_of(all.begin(), all.end(), [](const json& entry) { return entry.is_string(); });
  return checked(field, fits, "has an entry that is not a text").get<std::vector<std::string>>();
}

}  // namespace tessera::internal
