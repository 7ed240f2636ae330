#include "checkpoint/format/checked_json.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "core/runtime/lfs_pointer.h"

namespace tessera::internal {

using nlohmann::json;

namespace {

// Builds a JSON value from the parser's events. Used instead of nlohmann's callback parser, whose cost is quadratic in
// the number of members: at the end of each member, that parser scans all earlier members.
class TreeBuilder : public nlohmann::json_sax<json> {
 public:
  TreeBuilder(const std::string& where, int max_depth, const MemberVisitor* visit = nullptr)
      : where_(where), max_depth_(max_depth), visit_(visit) {}

  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(int64_t value) override { return add(value); }
  bool number_unsigned(uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string& /*digits*/) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(json::binary_t& /*value*/) override { throw std::logic_error("JSON text has no binary values"); }
  bool start_object(size_t /*members*/) override { return open(json::object()); }
  bool start_array(size_t /*elements*/) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    const auto [member, is_new] = open_.back()->get_ref<json::object_t&>().try_emplace(std::move(name));
    if (!is_new || (visits_members() && !visited_.insert(member->first).second))
      throw CheckpointError(where_ + ": the key '" + member->first + "' occurs twice");
    member_ = &member->second;
    return true;
  }
  bool parse_error(size_t /*position*/, const std::string& /*token*/, const json::exception& error) override {
    throw CheckpointError(where_ + ": not JSON: " + error.what());
  }

 private:
  // Adds a value to the innermost unfinished object or array. Only that one grows, so the pointers in open_ stay valid.
  json& place(json value) {
    if (open_.empty()) return root_ = std::move(value);
    json& parent = *open_.back();
    if (parent.is_object()) return *member_ = std::move(value);
    return parent.get_ref<json::array_t&>().emplace_back(std::move(value));
  }
  bool add(json value) { return place(std::move(value)), end_value(); }
  bool open(json value) {
    if (std::ssize(open_) >= max_depth_)
      throw CheckpointError(where_ + ": JSON nested deeper than " + std::to_string(max_depth_) + " levels");
    return open_.push_back(&place(std::move(value))), true;
  }
  bool close() { return open_.pop_back(), end_value(); }
  bool visits_members() const { return visit_ != nullptr && open_.size() == 1 && root_.is_object(); }
  bool end_value() {
    if (visits_members()) {
      const auto member = root_.begin();  // the only member, because earlier members were erased
      (*visit_)(member.key(), member.value());
      root_.clear();
    }
    return true;
  }

  const std::string& where_;
  const int max_depth_;
  const MemberVisitor* const visit_;
  std::unordered_set<std::string> visited_;
  json root_;
  std::vector<json*> open_;  // unfinished objects and arrays, from the root to the innermost
  json* member_ = nullptr;   // the value for the key that was read last
};

}  // namespace

bool is_count(const json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{JsonObject::kMost};
}

json parse_json(std::string_view text, const std::string& where, int max_depth) {
  if (const std::string problem = lfs_problem(text); !problem.empty()) throw CheckpointError(where + ": " + problem);
  TreeBuilder builder(where, max_depth);
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

void visit_json_members(std::string_view text, const std::string& where, int max_depth, const MemberVisitor& visit) {
  TreeBuilder builder(where, max_depth, &visit);
  json::sax_parse(text.begin(), text.end(), &builder);
  if (!builder.take().is_object()) throw CheckpointError(where + ": its header is not an object");
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
