#include "checkpoint/load/find_checkpoints.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include <tessera/checkpoint.h>
#include <tessera/errors.h>
#include "checkpoint/format/entries.h"
#include "checkpoint/save/commit.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

constexpr char kSequence[] = "\"sequence\": ";

std::string explain_missing(const fs::path& directory) {
  std::error_code ignored;
  const std::string where = directory.string();
  const bool is_local = !is_remote(directory);
  if (!is_local && storage_of(directory).list(directory).empty()) return where + ": there is nothing";
  if (is_local && !fs::exists(directory, ignored)) return where + ": there is no such directory";
  if (is_local && !fs::is_directory(directory, ignored))
    return where + ": is not a directory; a single file is for load_full()";
  const size_t inside_count = checkpoints_in(directory).size();
  if (inside_count > 0)
    return where + ": is not a checkpoint but holds " + std::to_string(inside_count) + "; latest_checkpoint() gives " +
           latest_checkpoint(directory)->string();
  return where + ": is not a checkpoint: it has no " + kManifestName +
         (is_local && fs::is_empty(directory, ignored) ? ", it is empty" : "") +
         inner_folder_of_checkpoints(directory) + " (safetensors files of another program are for load_full())";
}

// Returns whether a name has the form "rank-00042-0.safetensors".
bool is_rank_file(const std::string& listed) {
  constexpr std::string_view kStart = "rank-", kEnd = ".safetensors";
  return listed.starts_with(kStart) && listed.ends_with(kEnd) &&
         listed.find_first_not_of("0123456789-", kStart.size()) == listed.size() - kEnd.size();
}

struct Contents {
  int ranks = 0;   // number of rank files, plus number of data folders of remote saves
  int others = 0;  // number of entries that do not belong to a save
};
Contents contents_of(const fs::path& checkpoint) {
  Contents contents;
  for (const std::string& name : storage_of(checkpoint).list(checkpoint)) {
    if (!save_folder(name).empty() || is_rank_file(name))
      ++contents.ranks;
    else if (!is_of_save(name))
      ++contents.others;
  }
  return contents;
}

// Returns the text of a checkpoint's manifest, or "" if the manifest was removed or two reads fail. Reads twice,
// because one read may fail while another job replaces the manifest. Does not catch StorageUnavailable.
std::string manifest_text_or_nothing(const fs::path& checkpoint) {
  for (int attempt = 0; attempt < 2 && is_checkpoint(checkpoint); ++attempt) try {
      return read_text(checkpoint / kManifestName, kMaxManifestBytes);
    } catch (const StorageUnavailable&) {
      throw;
    } catch (const CheckpointError&) {
    }
  return "";
}

// Repeats a listing that finds nothing, because a listing may miss both checkpoints while one replaces the other.
std::vector<fs::path> entries_with_manifest(const fs::path& folder) {
  constexpr int kMostListings = 3;
  std::vector<fs::path> found;
  for (int listing = 0; listing < kMostListings && found.empty(); ++listing) found = checkpoints_in(folder);
  return found;
}

FoundCheckpoints found_among(const std::vector<fs::path>& listed) {
  std::vector<std::pair<int64_t, fs::path>> whole;
  FoundCheckpoints found;
  for (const auto& path : listed) {
    const std::string text = manifest_text_or_nothing(path);
    if (const auto sequence = sequence_of(text)) {
      whole.emplace_back(*sequence, path);
      continue;
    }
    const auto [ranks, others] = contents_of(path);
    if ((ranks > 0 || others == 0) && is_checkpoint(path)) found.damaged.push_back(path);
  }
  std::ranges::sort(whole);
  for (auto& [sequence, path] : whole) {
    found.whole.push_back(std::move(path));
    found.sequences.push_back(sequence);
  }
  return found;
}

}  // namespace

std::string save_folder(const std::string& listed) {
  const bool fits =
      listed.size() == 17 && listed.back() == '/' && listed.find_first_not_of("0123456789abcdef") == listed.size() - 1;
  return fits ? listed.substr(0, 16) : "";
}

bool is_of_save(const std::string& listed) {
  return !save_folder(listed).empty() || is_rank_file(listed) || listed == kManifestName || listed == kDraftName ||
         listed.starts_with(".part-") || listed.starts_with(".group-") || listed.starts_with(".nfs");
}

bool is_checkpoint(const fs::path& path) { return storage_of(path).exists(path / kManifestName); }

std::vector<fs::path> checkpoints_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const std::string& name : storage_of(folder).list(folder)) {
    if (name[0] == '.' || !name.ends_with('/')) continue;
    const fs::path path = folder / name.substr(0, name.size() - 1);
    if (!is_remote(folder) && fs::is_symlink(path, ignored)) continue;
    if (is_checkpoint(path)) found.push_back(path);
  }
  return found;
}

std::string inner_folder_of_checkpoints(const fs::path& folder) try {
  if (is_remote(folder)) return "";  // each listing would be a request
  for (const std::string& name : storage_of(folder).list(folder)) {
    if (name[0] == '.' || !name.ends_with('/')) continue;
    const fs::path inner = folder / name.substr(0, name.size() - 1);
    if (!checkpoints_in(inner).empty()) return "; " + inner.string() + " holds checkpoints";
  }
  return "";
} catch (const StorageUnavailable&) {
  return "";
}

bool has_rank_files(const fs::path& folder) { return contents_of(folder).ranks > 0; }

FoundCheckpoints find_checkpoints(const fs::path& folder) {
  constexpr int kMostListings = 100;
  for (int listing = 1;; ++listing) {
    const auto listed = entries_with_manifest(folder);
    FoundCheckpoints found = found_among(listed);
    // Lists again if other jobs removed the listed checkpoints, because these jobs may also have saved newer ones.
    const bool lists_again = found.whole.empty() && found.damaged.empty() && listing < kMostListings &&
                             !std::ranges::all_of(listed, [](const fs::path& path) { return is_checkpoint(path); });
    if (!lists_again) return found;
  }
}

void require_folder_of_checkpoints(const fs::path& folder) {
  std::error_code ignored;
  if (!is_remote(folder) && fs::exists(fs::symlink_status(folder, ignored)) && !fs::is_directory(folder, ignored))
    throw CheckpointError(folder.string() + ": is not a directory, expected a folder of checkpoints");
  if (!is_checkpoint(folder) || (!peek_sequence(folder) && contents_of(folder).ranks == 0)) return;
  throw CheckpointError(folder.string() +
                        ": is a checkpoint itself, expected a folder of checkpoints: load_checkpoint() loads it");
}

bool holds_nothing_else(const fs::path& checkpoint) {
  return is_checkpoint(checkpoint) && contents_of(checkpoint).others == 0;
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
  // 256 bytes are enough, because format_manifest() writes the fields "format" and "sequence" first.
  std::string start;
  try {
    start = storage_of(directory).beginning(directory / kManifestName, 256);
  } catch (const StorageUnavailable&) {
    throw;
  } catch (const CheckpointError&) {  // the manifest is not a regular file
    return std::nullopt;
  }
  const auto format = start.find("\"format\": \"tessera-checkpoint\"");
  const auto found = start.find(kSequence, format);
  if (format == std::string::npos || found == std::string::npos) return std::nullopt;
  int64_t sequence = 0;
  const char* digits = start.data() + found + std::strlen(kSequence);
  if (std::from_chars(digits, start.data() + start.size(), sequence).ec != std::errc()) return std::nullopt;
  if (sequence < 0 || sequence >= JsonObject::kMost) return std::nullopt;
  return sequence;
}

}  // namespace tessera::internal

namespace tessera {
using namespace internal;

std::optional<fs::path> latest_checkpoint(const fs::path& folder) {
  const auto [whole, damaged, sequences] = find_checkpoints(folder);
  if (!damaged.empty()) return damaged.back();
  if (!whole.empty()) return whole.back();
  require_folder_of_checkpoints(folder);
  return std::nullopt;
}

}  // namespace tessera
