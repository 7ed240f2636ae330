#include "checkpoint/format/safetensors_header.h"

#include <endian.h>

#include <algorithm>
#include <cstring>

#include <tessera/errors.h>
#include "checkpoint/format/box.h"
#include "core/runtime/lfs_pointer.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kDataAlignmentBytes = 64;
constexpr int kHeaderDepth = 8;

constexpr std::pair<const char*, at::ScalarType> kNames[] = {
    {"F64", at::kDouble},       {"I64", at::kLong},   {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F32", at::kFloat},        {"I32", at::kInt},    {"F8_E5M2", at::kFloat8_e5m2},
    {"F16", at::kHalf},         {"I16", at::kShort},  {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"BF16", at::kBFloat16},    {"I8", at::kChar},    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"C64", at::kComplexFloat}, {"U64", at::kUInt64}, {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"BOOL", at::kBool},        {"U32", at::kUInt32}, {"U16", at::kUInt16},
    {"U8", at::kByte}};

SafetensorsEntry parse_entry(const std::string& name, const json& value, int64_t header_bytes,
                             const std::string& where) {
  check_tensor_name(name, where);
  const JsonObject fields(value, where + ": tensor '" + name + "'", {"dtype", "shape", "data_offsets"});
  SafetensorsEntry entry{name, dtype_field(fields), fields.numbers("shape")};
  const auto bytes = tensor_bytes(entry.shape, entry.dtype);
  const auto offsets = fields.numbers("data_offsets");
  if (offsets.size() != 2 || offsets[0] > offsets[1]) fields.refuse("'data_offsets' is not a range");
  if (!bytes || *bytes != offsets[1] - offsets[0])
    fields.refuse("the shape " + to_string(entry.shape) + " of " + fields.text("dtype") + " does not fit the " +
                  std::to_string(offsets[1] - offsets[0]) + " bytes it has");
  entry.begin = header_bytes + offsets[0];
  entry.bytes = *bytes;
  return entry;
}

void check_order(std::vector<SafetensorsEntry>& entries, int64_t header_bytes, int64_t file_bytes,
                 const std::string& where) {
  std::ranges::sort(entries, [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.bytes, a.name) < std::tie(b.begin, b.bytes, b.name);
  });
  int64_t end = header_bytes;
  for (const auto& entry : entries) {
    require<CheckpointError>(entry.begin == end, where, ": tensor '", entry.name, "': its data begins at byte ",
                             entry.begin, entry.begin < end ? ", inside another's" : ", after a hole", "; expected ",
                             end);
    end += entry.bytes;
  }
  require<CheckpointError>(end == file_bytes, where, ": has ", file_bytes, " bytes, but its header describes ", end,
                           file_bytes < end ? ": it is truncated" : "");
}

}  // namespace

std::optional<std::string> safetensors_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kNames)
    if (type == dtype) return name;
  return std::nullopt;
}

std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    if (size > kLimit / bytes) return std::nullopt;
    bytes *= std::max(size, int64_t{1});  // strides of a tensor without elements must not overflow, either
  }
  return std::ranges::find(sizes, 0) == sizes.end() ? bytes : 0;
}

at::ScalarType dtype_field(const JsonObject& fields) {
  const std::string text = fields.text("dtype");
  for (const auto& [name, type] : kNames)
    if (text == name) return type;
  fields.refuse("the dtype '" + text + "' is not known");
}

void check_dtype(const std::string& tensor, at::ScalarType dtype) {
  require(safetensors_name(dtype).has_value(), "'", tensor, "' has the dtype ", c10::toString(dtype),
          ", which safetensors files have no name for");
}

bool is_utf8(const std::string& text) try {
  static_cast<void>(json(text).dump());
  return true;
} catch (const json::exception&) {
  return false;
}

void check_tensor_name(const std::string& name, const std::string& where) {
  constexpr size_t kMaxBytes = 4096, kShownBytes = 60;
  std::string reason;
  if (name.empty()) reason = "is empty";
  if (name.size() > kMaxBytes)
    reason = "has " + std::to_string(name.size()) + " bytes, more than " + std::to_string(kMaxBytes);
  if (name == "__metadata__") reason = "is what safetensors files call something else";
  if (std::ranges::any_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7f; }))
    reason = "has control characters";
  if (reason.empty() && !is_utf8(name)) reason = "is not UTF-8";
  if (reason.empty()) return;
  const std::string shown =
      json(name.substr(0, kShownBytes)).dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  throw CheckpointError(where + ": a tensor's name " + reason + ": " + shown +
                        (name.size() > kShownBytes ? " and so on" : ""));
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_bytes, const std::string& where) {
  SafetensorsHeader header{.header_bytes = kLengthBytes + static_cast<int64_t>(text.size())};
  visit_json_members(text, where, kHeaderDepth, [&](const std::string& name, const json& value) {
    if (name != "__metadata__") return header.entries.push_back(parse_entry(name, value, header.header_bytes, where));
    if (!value.is_object()) throw CheckpointError(where + ": __metadata__ is not an object");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string()) throw CheckpointError(where + ": __metadata__ has '" + key + "', which is not a text");
      header.metadata[key] = entry;
    }
  });
  check_order(header.entries, header.header_bytes, file_bytes, where);
  return header;
}

std::string read_header_bytes(const InputFile& file) {
  const std::string where = file.path().string();
  const int64_t file_bytes = file.bytes();
  require<CheckpointError>(file_bytes >= kLengthBytes, where, ": has ", file_bytes, " bytes, too few for a header");
  std::string beginning(static_cast<size_t>(std::min<int64_t>(file_bytes, 64)), '\0');
  file.read(beginning.data(), std::ssize(beginning), 0);
  if (const std::string problem = lfs_problem(beginning); !problem.empty())
    throw CheckpointError(where + ": " + problem);
  if (beginning.starts_with("PK\3\4") || beginning.starts_with("\x80\2"))
    throw CheckpointError(where + ": is a file of torch.save(); save it by Python's safetensors.torch instead");
  uint64_t text_bytes = 0;
  std::memcpy(&text_bytes, beginning.data(), kLengthBytes);
  text_bytes = le64toh(text_bytes);
  require<CheckpointError>(text_bytes <= static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - kLengthBytes)),
                           where, ": claims a header of ", text_bytes, " bytes; the file has ", file_bytes, ", and ",
                           kMaxHeaderBytes, " is the most allowed");
  std::string bytes(kLengthBytes + text_bytes, '\0');
  file.read(bytes.data(), static_cast<int64_t>(bytes.size()), 0);
  return bytes;
}

SafetensorsHeader read_safetensors_header(const InputFile& file) {
  const std::string bytes = read_header_bytes(file);
  return parse_safetensors_header(std::string_view(bytes).substr(kLengthBytes), file.bytes(), file.path().string());
}

std::string format_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata) {
  // Builds the text directly, because ordered_json would compare each new name with all earlier names.
  std::string text = "{";
  auto add = [&](const std::string& name, const std::string& value) {
    text.append(text.size() > 1 ? "," : "").append(json(name).dump()).append(":").append(value);
  };
  if (!metadata.empty()) add("__metadata__", json(metadata).dump());
  int64_t offset = 0;
  for (auto& entry : entries) {
    entry.begin = offset;
    entry.bytes = tensor_bytes(entry.shape, entry.dtype).value();
    offset += entry.bytes;
    add(entry.name, "{\"dtype\":\"" + safetensors_name(entry.dtype).value() + "\",\"shape\":" +
                        json(entry.shape).dump() + ",\"data_offsets\":" + json({entry.begin, offset}).dump() + "}");
  }
  text += '}';
  while ((kLengthBytes + text.size()) % kDataAlignmentBytes != 0) text += ' ';
  for (auto& entry : entries) entry.begin += kLengthBytes + static_cast<int64_t>(text.size());
  const uint64_t length = htole64(text.size());
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

}  // namespace tessera::internal
