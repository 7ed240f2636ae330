#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "checkpoint/format/manifest.h"
#include "checkpoint/storage/file_lock.h"

namespace tessera::internal {

// These functions turn a directory of files into a checkpoint in one atomic step (FORMAT.md, "How a checkpoint is
// written"). Rank 0 calls them. They are not collective, and throw CheckpointError on failure.

// A checkpoint that is being written.
class PartialCheckpoint {
 public:
  // Creates the folder for the ranks' files. Removes leftovers of killed saves of this target, and calls `progress` for
  // each removed file. On a local path, the folder is beside the target, and missing parents are created. On other
  // storage, the folder is in the target. Throws if the target exists and is neither a checkpoint (damaged or not) nor
  // empty, or if a local file system cannot replace it.
  static std::unique_ptr<PartialCheckpoint> begin(
      const std::filesystem::path& target, const std::function<void()>& progress = [] {});
  // After commit(), removes the replaced checkpoint unless it is being read. Otherwise removes the files of this save.
  virtual ~PartialCheckpoint() = default;
  PartialCheckpoint(const PartialCheckpoint&) = delete;
  PartialCheckpoint& operator=(const PartialCheckpoint&) = delete;

  // Returns the folder that the ranks write to. The folder contains a file named kDraftName.
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path folder() const { return target_.parent_path(); }
  uint64_t id() const { return id_; }

  // Sets the manifest's id and sequence, checks that its slices cover every tensor, and writes the manifest. The
  // checkpoint then appears in one step. The destructor removes a replaced checkpoint. Files that the user put into a
  // replaced checkpoint move to the new one.
  virtual void commit(Manifest manifest) = 0;

 protected:
  explicit PartialCheckpoint(const std::filesystem::path& target);
  // Sets id and sequence, and checks the manifest.
  void complete(Manifest& manifest) const;

  const std::filesystem::path target_;
  std::filesystem::path path_;
  const uint64_t id_;
  bool is_committed_ = false;
};

constexpr char kDraftName[] = ".manifest";  // marks a save in flight; its first line names the saving process
// Parts of the names of local temporary directories, which begin with a dot.
constexpr char kSaving[] = ".saving-";
constexpr char kMaking[] = ".making-";  // used until the directory is locked, then kSaving

// Removes from the folder all complete checkpoints but the newest `keep`, all checkpoints with damaged manifests, and
// the leftovers of killed saves. A local checkpoint that is being read stays until the next call. Never removes files
// that no save wrote.
void remove_old_checkpoints(const std::filesystem::path& folder, int keep);

// While a checkpoint is read, prevents its removal by keep_last or by a save that replaces it. Is a no-op on storage
// without locks, and if the lock cannot be taken within a second.
class ReadLock {
 public:
  explicit ReadLock(const std::filesystem::path& checkpoint);

  // Returns the current path of the locked checkpoint if a save has replaced it at `checkpoint`. Returns "" if the
  // checkpoint is still there, or if no lock is held.
  std::filesystem::path moved_from(const std::filesystem::path& checkpoint) const;

 private:
  std::filesystem::path directory() const { return lock_.path().parent_path(); }
  FileLock lock_;
};

// commit.cpp calls the functions below. There is one implementation for each kind of storage.
std::unique_ptr<PartialCheckpoint> begin_local_checkpoint(const std::filesystem::path& target,
                                                          const std::function<void()>& progress);
std::unique_ptr<PartialCheckpoint> begin_remote_checkpoint(const std::filesystem::path& target,
                                                           const std::function<void()>& progress);
// Is a no-op if a reader has locked the checkpoint, or if `sequence` is set and the checkpoint has another one.
void remove_local_checkpoint(const std::filesystem::path& checkpoint, std::optional<int64_t> sequence);
void remove_remote_checkpoint(const std::filesystem::path& checkpoint);
void clear_local_leftovers(const std::filesystem::path& folder);
void clear_remote_leftovers(const std::filesystem::path& folder);
uint64_t draw_checkpoint_id();

}  // namespace tessera::internal
