#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// These functions parse JSON from files that may be damaged or hostile. On failure, they throw CheckpointError with a
// text that starts with `where`, for example "step-200/tessera.json".

constexpr int kMaxJsonDepth = 64;

// Parses one JSON value. Throws for duplicate keys, nesting beyond max_depth, or text after the value.
nlohmann::json parse_json(std::string_view text, const std::string& where, int max_depth = kMaxJsonDepth);

using MemberVisitor = std::function<void(const std::string& name, const nlohmann::json& value)>;
// Parses one JSON object like parse_json(), but passes each member to `visit` and then frees the member. So a header
// with many tensors needs little memory. Throws if the value is not an object.
void visit_json_members(std::string_view text, const std::string& where, int max_depth, const MemberVisitor& visit);

// Returns whether the value is an integer from 0 to JsonObject::kMost.
bool is_count(const nlohmann::json& value);

// Returns the nesting depth of arrays and objects, or limit + 1 if the depth exceeds `limit`. A number has depth 0.
int json_depth(const nlohmann::json& value, int limit);

// Typed, checked access to the fields of a JSON object. Error texts start with `where`, the object's place in the file.
class JsonObject {
 public:
  static constexpr int64_t kMost = int64_t{1} << 62;

  // Borrows `value`. Throws if it is not an object, lacks a `required` field, or has a field that is in neither list.
  JsonObject(const nlohmann::json& value, std::string where, std::initializer_list<const char*> required,
             std::initializer_list<const char*> optional = {});

  bool has(const char* field) const { return value_.contains(field); }
  const nlohmann::json& at(const char* field) const { return value_.at(field); }
  // Return a field, which must exist. Throw if it has another type, or if number() is outside [least, most].
  std::string text(const char* field) const;
  int64_t number(const char* field, int64_t least = 0, int64_t most = kMost) const;
  uint64_t hex(const char* field) const;
  const nlohmann::json& array(const char* field) const;
  const nlohmann::json& object(const char* field) const;
  std::vector<int64_t> numbers(const char* field) const;
  std::vector<std::string> texts(const char* field) const;

  [[noreturn]] void refuse(const std::string& reason) const;
  const std::string& where() const { return where_; }

 private:
  const nlohmann::json& checked(const char* field, bool fits, const char* expected) const;

  const nlohmann::json& value_;
  std::string where_;
};

}  // namespace tessera::internal
