#include "tessera/checkpoint/checked_json.h"

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/errors.h"

namespace tessera {

using nlohmann::json;

json parse_json(std::string_view text, const std::string& where, int max_depth) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
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
  for (const auto& entry : value.items()) {
    auto is_it = [&](const char* field) { return entry.key() == field; };
    if (std::none_of(required.begin(), required.end(), is_it) && std::none_of(optional.begin(), optional.end(), is_it))
      refuse("the field '" + entry.key() + "' is not known");
  }
}

void JsonObject::refuse(const std::string& reason) const { throw CheckpointError(where_ + ": " + reason); }

std::string JsonObject::text(const char* field) const {
  if (!at(field).is_string()) refuse(std::string("'") + field + "' is not a text");
  return at(field).get<std::string>();
}

namespace {

bool is_count(const json& value) { return value.is_number_unsigned() && value.get<uint64_t>() <= (uint64_t{1} << 62); }

}  // namespace

int64_t JsonObject::number(const char* field) const {
  if (!is_count(at(field))) refuse(std::string("'") + field + "' is not a number of things");
  return at(field).get<int64_t>();
}

uint64_t JsonObject::hex(const char* field) const {
  try {
    return from_hex(text(field));
  } catch (const std::invalid_argument& error) {
    refuse(std::string("'") + field + "': " + error.what());
  }
}

std::vector<int64_t> JsonObject::numbers(const char* field) const {
  std::vector<int64_t> numbers;
  for (const auto& entry : array(field)) {
    if (!is_count(entry)) refuse(std::string("'") + field + "' has an entry that is not a number of things");
    numbers.push_back(entry.get<int64_t>());
  }
  return numbers;
}

const json& JsonObject::array(const char* field) const {
  if (!at(field).is_array()) refuse(std::string("'") + field + "' is not a list");
  return at(field);
}

const json& JsonObject::object(const char* field) const {
  if (!at(field).is_object()) refuse(std::string("'") + field + "' is not an object");
  return at(field);
}

}  // namespace tessera
