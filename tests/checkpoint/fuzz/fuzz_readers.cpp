// Fuzzes the readers of hostile files with libFuzzer, or without it with fuzz_driver.cpp. The first byte selects the
// reader. A reader must return or throw its error (CheckpointError, ExportedError). Any other exception, a sanitizer's
// report and excessive allocation are bugs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors_header.h"
#include "exported/archive/archive.h"

namespace {

using namespace tessera;
using namespace tessera::internal;

// Corrects the checksum, so that the code behind it is tested too. An accepted manifest of version 2 must be
// unchanged after writing and reading.
void read_manifest_text(std::string text) {
  nlohmann::json value = parse_json(text, "m");
  if (value.is_object()) {
    value.erase("checksum");
    std::string canonical;
    try {
      canonical = value.dump();
    } catch (const nlohmann::json::exception&) {
      return;
    }
    value["checksum"] = to_hex(checksum(canonical));
    text = value.dump();
  }
  const Manifest manifest = parse_manifest(text, "m");
  if (!manifest.saved.by_rank) return;  // version 1, which is not written
  const std::string once = format_manifest(manifest);
  if (format_manifest(parse_manifest(once, "m")) != once) __builtin_trap();
}

void read_header(const std::string& text) {
  // Half of the time, provides the data bytes that the header needs.
  int64_t data_bytes = 0;
  try {
    const auto value = parse_json(text, "f", 8);
    if (value.is_object())
      for (const auto& entry : value)
        if (entry.is_object() && entry.contains("data_offsets") && entry["data_offsets"].is_array() &&
            entry["data_offsets"].size() == 2 && entry["data_offsets"][1].is_number_unsigned())
          data_bytes =
              std::max<int64_t>(data_bytes, entry["data_offsets"][1].get<int64_t>() & ((int64_t{1} << 61) - 1));
  } catch (const CheckpointError&) {
  }
  auto header = parse_safetensors_header(text, 8 + static_cast<int64_t>(text.size()) + data_bytes, "f");
  // An accepted header can be written, and is read back equal.
  if (header.entries.size() > 1000) return;
  const std::string bytes = format_safetensors_header(header.entries, header.metadata);
  int64_t file_bytes = static_cast<int64_t>(bytes.size());
  for (const auto& entry : header.entries) file_bytes += entry.bytes;
  if (parse_safetensors_header(bytes.substr(8), file_bytes, "f").entries.size() != header.entries.size())
    __builtin_trap();
}

// Members are inside the archive and do not overlap.
void read_archive(const std::string& text) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  const ReadBytes read = [&](void* to, int64_t bytes, int64_t position) {
    if (position < 0 || bytes < 0 || position + bytes > std::ssize(text)) __builtin_trap();
    std::memcpy(to, text.data() + position, static_cast<size_t>(bytes));
  };
  for (const auto& [name, member] : read_zip(read, std::ssize(text), "a"))
    ranges.emplace_back(member.begin, member.begin + member.bytes);
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (const auto& [from, to] : ranges) {
    if (from < end || to < from || to > static_cast<int64_t>(text.size())) __builtin_trap();
    end = to;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (bytes == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, bytes - 1);
  try {
    switch (data[0] % 3) {
      case 0:
        read_header(text);
        break;
      case 1:
        read_manifest_text(text);
        break;
      default:
        read_archive(text);
    }
  } catch (const CheckpointError&) {
  } catch (const ExportedError&) {
  }
  return 0;
}
