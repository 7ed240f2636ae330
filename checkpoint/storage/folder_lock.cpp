#include <tessera/checkpoint.h>

#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "checkpoint/format/entries.h"
#include "checkpoint/storage/file_lock.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;

namespace fs = std::filesystem;

namespace {

// Returns the path of the lock file. Throws if it exists but is not a regular file, because opening a pipe would block.
fs::path lock_file_in(const fs::path& folder) {
  if (folder.empty()) throw std::invalid_argument("FolderLock: the path is empty, expected a local folder");
  fs::path file = fs::absolute(folder) / ".tessera.lock";
  std::error_code error;
  if (const auto status = fs::symlink_status(file, error); fs::exists(status) && !fs::is_regular_file(status))
    throw CheckpointError(file.string() + ": is not a regular file; remove it");
  return file;
}

}  // namespace

FolderLock::FolderLock(const fs::path& folder) : file_(lock_file_in(folder)), lock_(std::make_unique<FileLock>()) {
  require(!is_remote(folder), "'", folder.string(), "' has no locks: FolderLock is for local folders");
  make_directories(file_.parent_path());
  std::ofstream(file_, std::ios::app).flush();  // creates the file if it does not exist
  const LockOutcome outcome = lock_->take_exclusive(file_);
  const std::string holder = first_line(file_);
  require<CheckpointError>(outcome != LockOutcome::kHeldByOther, folder.string(), ": is in use by ",
                           holder.empty() ? "another process" : holder, ": one job at a time can write there");
  if (outcome == LockOutcome::kNoLocks && !holder.empty() && !is_of_ended_process(holder))
    throw CheckpointError(folder.string() + ": seems to be in use by " + holder +
                          "; this file system has no locks: if that job has ended, remove " + file_.string());
  std::ofstream text(file_, std::ios::trunc);
  text << process_name() << '\n' << std::flush;
  if (!text) fail_at(file_, "cannot be written");
}

FolderLock::FolderLock(FolderLock&& other) noexcept
    : file_(std::exchange(other.file_, {})), lock_(std::move(other.lock_)) {}

FolderLock::~FolderLock() {
  if (file_.empty()) return;  // this object was moved from
  std::ofstream(file_, std::ios::trunc).flush();
}

}  // namespace tessera
