#include "tessera/checkpoint/commit.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr char kSaving[] = ".saving-";

uint64_t draw_id() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

fs::path normal(const fs::path& target) {
  fs::path path = fs::absolute(target).lexically_normal();
  return path.has_filename() ? path : path.parent_path();  // "dir/" is "dir"
}

// A lock on the directory, or -1: somebody has it, or the file system has no locks.
int try_lock(const fs::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

// Removes temporary directories that nobody has locked: of one target, or with an empty prefix of
// all. What cannot be removed stays; it is never taken for a checkpoint.
void clear_leftovers(const fs::path& folder, const std::string& prefix) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.empty() || name[0] != '.' || name.find(kSaving) == std::string::npos || !name.starts_with(prefix))
      continue;
    const int lock = try_lock(entry.path());
    if (lock < 0) continue;
    std::error_code error;
    fs::remove_all(entry.path(), error);
    ::close(lock);
  }
}

[[noreturn]] void fail(const fs::path& path, const std::string& doing, const std::error_code& error) {
  throw CheckpointError(path.string() + ": " + doing + ": " + error.message());
}

}  // namespace

PartialCheckpoint::PartialCheckpoint(const fs::path& target) : target_(normal(target)), id_(draw_id()) {
  if (!target_.has_filename()) throw CheckpointError(target.string() + ": is not a name for a checkpoint");
  std::error_code error;
  const fs::path folder = target_.parent_path();
  fs::create_directories(folder, error);
  if (error) fail(folder, "creating", error);
  const auto status = fs::symlink_status(target_, error);
  if (fs::exists(status) && !fs::is_directory(status))
    throw CheckpointError(target_.string() + ": exists and is not a directory");
  if (fs::is_directory(status) && !fs::is_empty(target_, error) && !peek_sequence(target_))
    throw CheckpointError(target_.string() +
                          ": is a directory that holds something else than a checkpoint; it is left as it is");
  const std::string prefix = std::string(".").append(target_.filename().string()) + kSaving;
  clear_leftovers(folder, prefix);
  path_ = folder / (prefix + to_hex(id_));
  if (!fs::create_directory(path_, error)) fail(path_, "creating", error);
  lock_ = try_lock(path_);
}

PartialCheckpoint::~PartialCheckpoint() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

void PartialCheckpoint::commit(Manifest manifest) {
  manifest.id = id_;
  manifest.sequence = 1;
  const auto others = complete_checkpoints(target_.parent_path());
  if (!others.empty()) manifest.sequence = peek_sequence(others.back()).value_or(0) + 1;
  check_saved_tensors(manifest.saved, path_.string());
  write_text(path_ / kManifestName, format_manifest(manifest));
  sync_directory(path_);
  std::error_code error;
  if (fs::is_directory(target_, error) && !fs::is_empty(target_, error)) {
    exchange_entries(path_, target_);  // the old one is removed by the destructor
  } else {
    rename_entry(path_, target_, fs::is_directory(target_, error));
  }
  sync_directory(target_.parent_path());
}

std::vector<fs::path> complete_checkpoints(const fs::path& folder) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string()[0] == '.' || !entry.is_directory(ignored)) continue;
    if (const auto sequence = peek_sequence(entry.path())) found.emplace_back(*sequence, entry.path());
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  for (auto& [sequence, path] : found) paths.push_back(std::move(path));
  return paths;
}

void remove_old_checkpoints(const fs::path& folder, int keep) {
  auto all = complete_checkpoints(folder);
  const size_t excess = all.size() > static_cast<size_t>(keep) ? all.size() - static_cast<size_t>(keep) : 0;
  for (size_t i = 0; i < excess; ++i) {
    // Renamed to a hidden name first, so that one that is half removed is not taken for whole.
    const fs::path hidden =
        folder / (std::string(".").append(all[i].filename().string()) + kSaving + to_hex(draw_id()));
    rename_entry(all[i], hidden, false);
  }
  clear_leftovers(folder, "");
}

}  // namespace tessera
