// Checkpoints in local folders. A save writes to a temporary folder. A rename to the final name commits the save.
#include <c10/util/StringUtil.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/save/commit.h"
#include "core/runtime/file.h"
#include "core/runtime/host.h"
#include "core/runtime/warn.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

constexpr auto kMakingTakes = std::chrono::minutes(5);
// On a file system without locks, a directory counts as abandoned after this time without a change.
constexpr auto kWithoutLocks = std::chrono::hours(24);

// Returns the common prefix of the names of a target's temporary directories, which are hidden and beside the target.
std::string hidden_prefix(const fs::path& target) { return "." + target.filename().string() + "."; }
fs::path hidden_name(const fs::path& target, uint64_t id, const char* stage = kSaving) {
  return target.parent_path() / ("." + target.filename().string() + stage + to_hex(id));
}

bool is_gone(const fs::path& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() == fs::file_type::not_found;
}

// Returns whether a directory's last change is older than `age` by the file system's clock instead of this host's.
bool is_older_than(const fs::path& directory, std::chrono::seconds age) {
  std::error_code error, ignored;
  const auto written = fs::last_write_time(directory, error);
  if (error) return false;
  const fs::path made_now = hidden_name(directory, random_bits(), ".now-");
  if (!fs::create_directory(made_now, error)) return false;
  const auto now = fs::last_write_time(made_now, error);
  fs::remove(made_now, ignored);
  return !error && now - written > age;
}

// Returns whether the directory is a leftover of a save that was killed before it locked the directory.
bool is_left_in_the_making(const fs::path& directory) {
  FileLock lock;
  return lock.take_exclusive(directory / kDraftName) != LockOutcome::kHeldByOther &&
         is_older_than(directory, kMakingTakes);
}

// Returns whether no process uses the hidden directory. If so, `lock` locks its manifest or draft, if possible.
bool is_abandoned(const fs::path& directory, FileLock& lock) {
  std::error_code error;
  // Looks for the draft first, because a save may rename the draft to the manifest between the two checks.
  const bool is_draft = fs::exists(directory / kDraftName, error);
  const fs::path manifest = directory / (is_draft ? kDraftName : kManifestName);
  if (!fs::exists(manifest, error)) return !is_draft;
  const LockOutcome outcome = lock.take_exclusive(manifest);
  if (outcome != LockOutcome::kNoLocks) return outcome == LockOutcome::kTaken;
  return is_of_ended_process(first_line(manifest)) || is_older_than(directory, kWithoutLocks);
}

std::vector<fs::path> entries_in(const fs::path& directory, bool of_saves) {
  std::vector<fs::path> entries;
  std::error_code ignored;
  for (const auto& entry : entries_of(directory, ignored)) {
    const bool is_folder = fs::is_directory(entry.symlink_status(ignored));
    if (is_of_save(entry.path().filename().string() + (is_folder ? "/" : "")) == of_saves)
      entries.push_back(entry.path());
  }
  return entries;
}

// Moves the user's own files from a hidden directory back to the checkpoint's path. If the process is killed during the
// move, the next cleanup completes the move. If a file cannot be moved, prints a warning and leaves the file.
void bring_back_own(const fs::path& hidden) {
  const std::string name = hidden.filename().string();
  for (const fs::path& from : entries_in(hidden, /*of_saves=*/false)) {
    const fs::path folder = hidden.parent_path() / name.substr(1, name.rfind(kSaving) - 1);
    const fs::path to = folder / from.filename();
    std::error_code ignored;
    fs::create_directory(folder, ignored);
    std::string reason = is_gone(to) ? "" : "there is one already";
    if (reason.empty()) try {
        rename_entry(from, to, false);
        sync_directory(folder);
      } catch (const CheckpointError& error) {
        reason = error.what();
      }
    if (!reason.empty()) {
      warn(c10::str(from.string(), " is of no save, and could not be moved to ", to.string(), ": ", reason));
    }
  }
}

// Removes the files of saves from a superseded hidden directory, then the directory. Other processes may remove the
// directory at the same time. Returns "" on success, or the reason why the directory still exists. Unlocks the manifest
// before its removal, because NFS renames an open file instead of removing it.
std::string remove_hidden(const fs::path& directory, FileLock& lock, const std::function<void()>& progress = [] {}) {
  std::error_code failure;
  auto remove = [&](const fs::path& path) {
    std::error_code error, ignored;
    if (fs::is_directory(fs::symlink_status(path, ignored)))
      remove_all_of(path, error);
    else
      fs::remove(path, error);
    if (error && !failure) failure = error;
  };
  for (const fs::path& path : entries_in(directory, /*of_saves=*/true))
    if (const auto name = path.filename(); name != kManifestName && name != kDraftName) remove(path), progress();
  lock.release();
  for (const char* name : {kManifestName, kDraftName}) remove(directory / name);
  std::error_code error;
  fs::remove(directory, error);
  return is_gone(directory) ? "" : (failure ? failure : error).message();
}

// Removes the abandoned temporary directories whose names start with `prefix` (hidden_prefix()). Ignores failures,
// because leftovers do not disturb readers, which skip hidden directories.
void clear_leftovers(const fs::path& folder, const std::string& prefix, const std::function<void()>& progress = [] {}) {
  std::error_code ignored;
  for (const auto& entry : entries_of(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with('.') || !name.starts_with(prefix) || !entry.is_directory(ignored)) continue;
    FileLock lock;
    const bool needless = (name.find(kSaving) != std::string::npos && is_abandoned(entry.path(), lock)) ||
                          (name.find(kMaking) != std::string::npos && is_left_in_the_making(entry.path()));
    if (!needless) continue;
    bring_back_own(entry.path());
    remove_hidden(entry.path(), lock, progress);
  }
}

// Throws if the file system cannot exchange directories. Is called before any data is written, to fail early.
void require_exchange(const fs::path& directory) {
  const fs::path a = directory / ".part-a", b = directory / ".part-b";
  std::error_code error;
  for (const auto& each : {a, b})
    if (!fs::create_directory(each, error)) throw CheckpointError(each.string() + ": creating: " + error.message());
  exchange_entries(a, b);
  for (const auto& each : {a, b}) fs::remove(each, error);
}

// A save to a local folder. Holds a lock on the draft, so that cleanups by other saves skip the directory.
class LocalPartial : public PartialCheckpoint {
 public:
  LocalPartial(const fs::path& target, const std::function<void()>& progress);
  ~LocalPartial() override;
  void commit(Manifest manifest) override;

 private:
  FileLock lock_;
};

LocalPartial::LocalPartial(const fs::path& target, const std::function<void()>& progress) : PartialCheckpoint(target) {
  std::error_code error;
  const fs::path folder = target_.parent_path();
  make_directories(folder);
  const auto status = fs::symlink_status(target_, error);
  if (fs::exists(status) && !fs::is_directory(status))
    throw CheckpointError(target_.string() + ": exists and is not a directory");
  if (fs::is_directory(status) && !fs::is_empty(target_, error) && !peek_sequence(target_) &&
      !holds_nothing_else(target_))
    throw CheckpointError(target_.string() +
                          ": is a directory that holds something else than a checkpoint; it is left as it is");
  clear_leftovers(folder, hidden_prefix(target_), progress);
  // Locks the directory before the rename to its kSaving name. Other jobs would remove an unlocked kSaving directory.
  path_ = hidden_name(target_, id_, kMaking);
  if (!fs::create_directory(path_, error)) throw CheckpointError(path_.string() + ": creating: " + error.message());
  try {
    write_text(path_ / kDraftName, process_name() + "\n");
    // Retries, because another job may hold the lock briefly to check whether this directory is abandoned.
    while (lock_.take_exclusive(path_ / kDraftName) == LockOutcome::kHeldByOther)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (fs::is_directory(status) && !fs::is_empty(target_, error)) require_exchange(path_);
    const fs::path locked = hidden_name(target_, id_);
    rename_entry(path_, locked, false);
    path_ = locked;
  } catch (...) {
    remove_hidden(path_, lock_);
    throw;
  }
}

LocalPartial::~LocalPartial() {
  FileLock replaced;
  if (is_committed_ && !is_abandoned(path_, replaced)) return;
  remove_hidden(path_, is_committed_ ? replaced : lock_);  // if the removal fails, the next save to this target retries
}

void LocalPartial::commit(Manifest manifest) {
  complete(manifest);
  {
    const std::string text = format_manifest(manifest);
    const File draft = open_file_to_write(path_ / kDraftName);
    draft.resize(0);
    draft.write(text.data(), static_cast<int64_t>(text.size()), 0);
    draft.sync();
  }
  rename_entry(path_ / kDraftName, path_ / kManifestName, false);
  sync_directory(path_);
  std::error_code error;
  if (fs::is_directory(target_, error) && !fs::is_empty(target_, error)) {
    exchange_entries(path_, target_);  // the destructor removes the old checkpoint, now at path_
  } else {
    rename_entry(path_, target_, fs::is_directory(target_, error));
  }
  is_committed_ = true;
  lock_.release();  // lets readers lock the new checkpoint
  sync_directory(target_.parent_path());
  bring_back_own(path_);  // runs even if a reader has locked the replaced checkpoint
}

}  // namespace

std::unique_ptr<PartialCheckpoint> begin_local_checkpoint(const fs::path& target,
                                                          const std::function<void()>& progress) {
  return std::make_unique<LocalPartial>(target, progress);
}

void remove_local_checkpoint(const fs::path& checkpoint, std::optional<int64_t> sequence) {
  FileLock lock;
  if (lock.take_exclusive(checkpoint / kManifestName) == LockOutcome::kHeldByOther) return;  // a reader holds the lock
  // Skips the path if another job has replaced the checkpoint since the listing.
  if (sequence && peek_sequence(checkpoint) != sequence) return;
  // Renames the checkpoint to a hidden name first, so that a partly removed checkpoint does not look complete.
  const fs::path hidden = hidden_name(checkpoint, random_bits());
  try {
    rename_entry(checkpoint, hidden, false);
  } catch (const CheckpointError&) {
    if (is_gone(checkpoint)) return;  // another job removed it
    throw;
  }
  if (sequence && peek_sequence(hidden) != sequence) try {  // another job replaced it before the rename
      return rename_entry(hidden, checkpoint, false);
    } catch (const CheckpointError&) {  // another job already saved a newer checkpoint to this path
      if (is_gone(checkpoint)) throw;
    }
  bring_back_own(hidden);
  if (const std::string error = remove_hidden(hidden, lock); !error.empty())
    throw CheckpointError(hidden.string() + ": removing: " + error);
}

void clear_local_leftovers(const fs::path& folder) { clear_leftovers(folder, ""); }

}  // namespace tessera::internal
