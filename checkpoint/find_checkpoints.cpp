#include "tessera/checkpoint/find_checkpoints.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr char kSequence[] = "\"sequence\": ";

// Why a directory has no manifest.
std::string explain_missing(const fs::path& directory) {
  std::error_code ignored;
  const std::string where = directory.string();
  const bool is_local = !is_remote(directory);
  if (!is_local && storage_of(directory).list(directory).empty()) return where + ": there is nothing";
  if (is_local && !fs::exists(directory, ignored)) return where + ": there is no such directory";
  if (is_local && !fs::is_directory(directory, ignored))
    return where + ": is not a directory; a single file is for load_full()";
  const auto inside = complete_checkpoints(directory);
  if (!inside.empty())
    return where + ": is not a checkpoint but holds " + std::to_string(inside.size()) + "; latest_checkpoint() gives " +
           inside.back().string();
  return where + ": is not a checkpoint: it has no " + kManifestName +
         (is_local && fs::is_empty(directory, ignored) ? ", it is empty" : "") +
         " (safetensors files of another program are for load_full())";
}

}  // namespace

bool is_checkpoint(const fs::path& path) { return storage_of(path).exists(path / kManifestName); }

std::vector<fs::path> complete_checkpoints(const fs::path& folder) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code ignored;
  for (const std::string& name : storage_of(folder).list(folder)) {
    if (name[0] == '.' || !name.ends_with('/')) continue;
    const fs::path path = folder / name.substr(0, name.size() - 1);
    if (!is_remote(folder) && fs::is_symlink(path, ignored)) continue;
    if (const auto sequence = peek_sequence(path)) found.emplace_back(*sequence, path);
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  for (auto& [sequence, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::string read_manifest_text(const fs::path& directory) {
  if (!is_checkpoint(directory)) throw CheckpointError(explain_missing(directory));
  return read_text(directory / kManifestName, kMaxManifestBytes);
}

Manifest manifest_of(const std::string& text, const fs::path& directory) {
  Manifest manifest = parse_manifest(text, (directory / kManifestName).string());
  manifest.saved.directory = manifest.folder.empty() ? directory : directory / manifest.folder;
  return manifest;
}

Manifest read_manifest(const fs::path& directory) { return manifest_of(read_manifest_text(directory), directory); }

std::optional<int64_t> peek_sequence(const fs::path& directory) {
  // Where format_manifest() writes both fields.
  const std::string start = storage_of(directory).beginning(directory / kManifestName, 256);
  const auto format = start.find("\"format\": \"tessera-checkpoint\"");
  const auto found = start.find(kSequence, format);
  if (format == std::string::npos || found == std::string::npos) return std::nullopt;
  int64_t sequence = 0;
  const char* digits = start.data() + found + std::strlen(kSequence);
  if (std::from_chars(digits, start.data() + start.size(), sequence).ec != std::errc()) return std::nullopt;
  return sequence;
}

}  // namespace tessera
