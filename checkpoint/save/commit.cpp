#include "checkpoint/save/commit.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <tessera/errors.h>
#include "checkpoint/format/entries.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/storage/storage.h"
#include "core/runtime/host.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

// Returns the absolute form of a local path. If the path contains "..", resolves it through the file system, because
// after a symbolic link ".." means the parent of the link's target. First creates missing parents: without them,
// readers could not open a path such as "missing/../name".
fs::path where_it_leads(const fs::path& path) {
  const fs::path whole = fs::absolute(path);
  if (std::find(whole.begin(), whole.end(), "..") == whole.end()) return whole.lexically_normal();
  make_directories(whole.parent_path());
  std::error_code error;
  const fs::path found = fs::weakly_canonical(whole, error);
  if (error) throw CheckpointError(path.string() + ": looking at: " + error.message());
  return found;
}

// Removes trailing slashes, and makes a local path absolute.
fs::path normal(const fs::path& target) {
  if (target.empty()) return target;
  std::string text = is_remote(target) ? target.native() : where_it_leads(target).native();
  while (text.size() > 1 && text.ends_with('/') && !text.ends_with("://")) text.pop_back();
  return text;
}

}  // namespace

PartialCheckpoint::PartialCheckpoint(const fs::path& target) : target_(normal(target)), id_(random_bits()) {
  // Refuses an empty name and "s3://bucket". Refuses names of unfinished saves, which other saves would remove as
  // leftovers. Refuses names of manifests, which would make the parent look like a checkpoint.
  const std::string name = target_.filename().string();
  const bool is_taken =
      name == kManifestName || name == kDraftName ||
      (name.starts_with('.') && (name.find(kSaving) != std::string::npos || name.find(kMaking) != std::string::npos));
  const size_t start = scheme_of(target_).size() + 3;
  if (!target_.has_filename() || is_taken || (is_remote(target_) && target_.native().size() <= start) ||
      (scheme_of(target_) == "s3" && target_.native().find('/', start) == std::string::npos))
    throw CheckpointError(target.string() + ": is not a name for a checkpoint");
}

void PartialCheckpoint::complete(Manifest& manifest) const {
  manifest.id = manifest.saved.id = id_;
  manifest.folder.clear();
  manifest.sequence = 1;
  for (const auto& other : checkpoints_in(folder()))
    manifest.sequence = std::max(manifest.sequence, peek_sequence(other).value_or(0) + 1);
  check_saved_tensors(manifest.saved, path_.string());
}

std::unique_ptr<PartialCheckpoint> PartialCheckpoint::begin(const fs::path& target,
                                                            const std::function<void()>& progress) {
  return is_remote(target) ? begin_remote_checkpoint(target, progress) : begin_local_checkpoint(target, progress);
}

void remove_old_checkpoints(const fs::path& folder, int keep) {
  const auto [whole, damaged, sequences] = find_checkpoints(folder);
  auto remove = [&](const fs::path& path, std::optional<int64_t> sequence) {
    is_remote(folder) ? remove_remote_checkpoint(path) : remove_local_checkpoint(path, sequence);
  };
  for (size_t i = 0; i + static_cast<size_t>(keep) < whole.size(); ++i) remove(whole[i], sequences[i]);
  for (const auto& path : damaged)
    if (holds_nothing_else(path)) remove(path, std::nullopt);
  is_remote(folder) ? clear_remote_leftovers(folder) : clear_local_leftovers(folder);
}

ReadLock::ReadLock(const fs::path& checkpoint) {
  if (is_remote(checkpoint)) return;
  // Retries for at most a second. A process holds the exclusive lock only briefly: at the end of a save, and before it
  // removes the checkpoint.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (std::chrono::steady_clock::now() < end) {
    const LockOutcome outcome = lock_.take_shared(checkpoint / kManifestName);
    std::error_code error;
    // Checks the path again, because the checkpoint may have been replaced or removed before its manifest was locked.
    const bool is_same =
        outcome == LockOutcome::kTaken && (directory().empty() || fs::equivalent(directory(), checkpoint, error));
    if (outcome == LockOutcome::kNoLocks || is_same) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

fs::path ReadLock::moved_from(const fs::path& checkpoint) const {
  const fs::path now = directory();
  std::error_code error;
  return now.empty() || !is_checkpoint(now) || fs::equivalent(now, checkpoint, error) ? fs::path() : now;
}

}  // namespace tessera::internal
