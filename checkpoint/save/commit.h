#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "checkpoint/format/manifest.h"
#include "checkpoint/storage/file_lock.h"

namespace tessera::internal {

// In a group, ranks other than 0 must not use this header. No function is collective. Failures throw CheckpointError.

// Turns a folder of files into a checkpoint in one atomic step (FORMAT.md, "How a checkpoint is written").
class PartialCheckpoint {
 public:
  // Creates the folder for the ranks' files (and missing parent folders): beside a local target, or inside a remote
  // one. Removes leftovers of killed saves to this target, and calls `progress` after each removed file. Throws if the
  // target has a reserved name, or is neither empty nor a (possibly damaged) checkpoint. Also throws if a local file
  // system cannot replace the target atomically.
  static std::unique_ptr<PartialCheckpoint> begin(
      const std::filesystem::path& target, const std::function<void()>& progress = [] {});
  // After commit(), removes the replaced checkpoint unless a reader locked it. Without commit(), removes the new files.
  // After a failed commit() to remote storage, the next save removes them, unless the manifest was written after all.
  virtual ~PartialCheckpoint() = default;
  PartialCheckpoint(const PartialCheckpoint&) = delete;
  PartialCheckpoint& operator=(const PartialCheckpoint&) = delete;

  // Returns the folder to which the ranks write. The folder contains a file named kDraftName.
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path folder() const { return target_.parent_path(); }
  uint64_t id() const { return id_; }

  // Sets the manifest's id and sequence, checks that the slices cover every tensor, and writes the manifest. The new
  // checkpoint then appears atomically at the target. If there was a checkpoint at the target, commit() moves the
  // user's own files from the old checkpoint to the new one. The destructor removes the old checkpoint.
  virtual void commit(Manifest manifest) = 0;

 protected:
  explicit PartialCheckpoint(const std::filesystem::path& target);
  // Sets the manifest's id and sequence, and checks its slices.
  void complete(Manifest& manifest) const;

  const std::filesystem::path target_;
  std::filesystem::path path_;
  const uint64_t id_;
  bool is_committed_ = false;
};

constexpr char kDraftName[] = ".manifest";  // file of a save in flight; the first line names the saving process
constexpr char kSaving[] = ".saving-";      // in the hidden name of a temporary local directory, once it is locked
constexpr char kMaking[] = ".making-";      // in the directory's name until it is locked

// Removes three kinds of entries of a folder: complete checkpoints except the newest `keep`, checkpoints with damaged
// manifests, and leftovers of killed saves. Skips a local checkpoint while a reader has locked it. Never removes files
// that no save wrote.
void remove_old_checkpoints(const std::filesystem::path& folder, int keep);

// While a checkpoint is read, prevents its removal by keep_last or by a save that replaces the checkpoint. A no-op on
// storage without locks, and if another process holds the lock for more than a second.
class ReadLock {
 public:
  explicit ReadLock(const std::filesystem::path& checkpoint);

  // Returns the new path of the locked checkpoint if a save has replaced it at the path `checkpoint`. Returns "" if the
  // locked checkpoint is still at that path, or if no lock is held.
  std::filesystem::path moved_from(const std::filesystem::path& checkpoint) const;

 private:
  std::filesystem::path directory() const { return lock_.path().parent_path(); }
  FileLock lock_;
};

// commit.cpp calls the functions below. Each has an implementation for local and one for remote storage.
std::unique_ptr<PartialCheckpoint> begin_local_checkpoint(const std::filesystem::path& target,
                                                          const std::function<void()>& progress);
std::unique_ptr<PartialCheckpoint> begin_remote_checkpoint(const std::filesystem::path& target,
                                                           const std::function<void()>& progress);
// A no-op if a reader has locked the checkpoint, or if `sequence` is set and differs from the checkpoint's sequence.
void remove_local_checkpoint(const std::filesystem::path& checkpoint, std::optional<int64_t> sequence);
void remove_remote_checkpoint(const std::filesystem::path& checkpoint);
void clear_local_leftovers(const std::filesystem::path& folder);
void clear_remote_leftovers(const std::filesystem::path& folder);

}  // namespace tessera::internal
