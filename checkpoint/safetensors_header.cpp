#include "tessera/checkpoint/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/box.h"
#include "tessera/checkpoint/checked_json.h"
#include "tessera/checkpoint/dtype.h"
#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kDataAlignmentBytes = 64;
constexpr int kHeaderDepth = 8;

SafetensorsEntry parse_entry(const std::string& name, const json& value, int64_t header_bytes,
                             const std::string& where) {
  check_tensor_name(name, where);
  const JsonObject fields(value, where + ": tensor '" + name + "'", {"dtype", "shape", "data_offsets"});
  SafetensorsEntry entry{.name = name};
  const auto dtype = dtype_of(fields.text("dtype"));
  if (!dtype) fields.refuse("the dtype '" + fields.text("dtype") + "' is not known");
  entry.dtype = *dtype;
  entry.shape = fields.numbers("shape");
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
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.bytes, a.name) < std::tie(b.begin, b.bytes, b.name);
  });
  int64_t end = header_bytes;
  for (const auto& entry : entries) {
    if (entry.begin != end)
      throw CheckpointError(
          where + ": tensor '" + entry.name + "': its data begins at byte " + std::to_string(entry.begin) +
          (entry.begin < end ? ", inside another's" : ", after a hole") + "; expected " + std::to_string(end));
    end += entry.bytes;
  }
  if (end != file_bytes)
    throw CheckpointError(where + ": has " + std::to_string(file_bytes) + " bytes, but its header describes " +
                          std::to_string(end) + (file_bytes < end ? ": it is truncated" : ""));
}

}  // namespace

void check_tensor_name(const std::string& name, const std::string& where) {
  constexpr size_t kMaxBytes = 4096;
  std::string reason;
  if (name.empty()) reason = "a tensor's name is empty";
  if (name.size() > kMaxBytes) reason = "a tensor's name has " + std::to_string(name.size()) + " bytes";
  if (name == "__metadata__") reason = "a tensor is named __metadata__";
  for (const char character : name)
    if (static_cast<unsigned char>(character) < 0x20 || character == 0x7f)
      reason = "a tensor's name has control characters";
  try {
    if (reason.empty()) static_cast<void>(json(name).dump());
  } catch (const json::exception&) {
    reason = "a tensor's name is not UTF-8";
  }
  if (!reason.empty()) throw CheckpointError(where + ": " + reason);
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_bytes, const std::string& where) {
  const json parsed = parse_json(text, where, kHeaderDepth);
  if (!parsed.is_object()) throw CheckpointError(where + ": its header is not an object");
  SafetensorsHeader header{.header_bytes = kLengthBytes + static_cast<int64_t>(text.size())};
  for (const auto& [name, value] : parsed.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(parse_entry(name, value, header.header_bytes, where));
      continue;
    }
    if (!value.is_object()) throw CheckpointError(where + ": __metadata__ is not an object");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string()) throw CheckpointError(where + ": __metadata__ has '" + key + "', which is not a text");
      header.metadata[key] = entry.get<std::string>();
    }
  }
  check_order(header.entries, header.header_bytes, file_bytes, where);
  return header;
}

SafetensorsHeader read_safetensors_header(const File& file) {
  const std::string where = file.path().string();
  const int64_t file_bytes = file.bytes();
  if (file_bytes < kLengthBytes)
    throw CheckpointError(where + ": has " + std::to_string(file_bytes) + " bytes, too few for a header");
  unsigned char length[kLengthBytes];
  file.read(length, kLengthBytes, 0);
  uint64_t text_bytes = 0;
  for (int i = kLengthBytes; i-- > 0;) text_bytes = text_bytes << 8 | length[i];
  if (text_bytes > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - kLengthBytes)))
    throw CheckpointError(where + ": claims a header of " + std::to_string(text_bytes) + " bytes; the file has " +
                          std::to_string(file_bytes) + ", and " + std::to_string(kMaxHeaderBytes) +
                          " is the most allowed");
  std::string text(text_bytes, '\0');
  file.read(text.data(), static_cast<int64_t>(text_bytes), kLengthBytes);
  return parse_safetensors_header(text, file_bytes, where);
}

std::string format_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (auto& entry : entries) {
    entry.bytes = tensor_bytes(entry.shape, entry.dtype).value();
    header[entry.name] = {{"dtype", safetensors_name(entry.dtype).value()},
                          {"shape", entry.shape},
                          {"data_offsets", {offset, offset + entry.bytes}}};
    offset += entry.bytes;
  }
  std::string text = header.dump();
  const auto unpadded = kLengthBytes + static_cast<int64_t>(text.size());
  text.append(static_cast<size_t>((kDataAlignmentBytes - unpadded % kDataAlignmentBytes) % kDataAlignmentBytes), ' ');
  std::string bytes(kLengthBytes, '\0');
  for (int i = 0; i < kLengthBytes; ++i) bytes[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  bytes += text;
  int64_t begin = static_cast<int64_t>(bytes.size());
  for (auto& entry : entries) {
    entry.begin = begin;
    begin += entry.bytes;
  }
  return bytes;
}

}  // namespace tessera
