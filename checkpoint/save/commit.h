#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "checkpoint/format/manifest.h"
#include "checkpoint/storage/file_lock.h"

namespace tessera::internal {

// Makes a directory a checkpoint in one atomic step, on rank 0 (FORMAT.md, "How a checkpoint is written"). Not
// collective; everything throws CheckpointError.

// A checkpoint that is being written.
class PartialCheckpoint {
 public:
  // Creates the folder for the ranks' files. Removes leftovers of killed saves of this target, and calls `progress` for
  // each removed file. On a local path, the folder is beside the target, whose parents are created; on other storage it
  // is in the target. Throws if an existing local target is neither a checkpoint (damaged or not) nor an empty
  // directory, or if its file system cannot replace it.
  static std::unique_ptr<PartialCheckpoint> begin(
      const std::filesystem::path& target, const std::function<void()>& progress = [] {});
  // If committed, removes the replaced checkpoint, except one that is being read; otherwise removes its own files.
  virtual ~PartialCheckpoint() = default;
  PartialCheckpoint(const PartialCheckpoint&) = delete;
  PartialCheckpoint& operator=(const PartialCheckpoint&) = delete;

  // The folder that the ranks write to. Contains a file named kDraftName.
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path folder() const { return target_.parent_path(); }
  uint64_t id() const { return id_; }

  // Checks that the manifest's slices cover every tensor, and writes it; the checkpoint then appears in one step. Sets
  // the manifest's id and sequence. The destructor removes a replaced checkpoint; the user's files in it move to the
  // new one.
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

constexpr char kDraftName[] = ".manifest";  // Marks a save in flight, and names the process that writes it.
// Part of the name of a local temporary directory, which begins with a dot.
constexpr char kSaving[] = ".saving-";
constexpr char kMaking[] = ".making-";  // used until the directory is locked

// Removes all but the newest `keep` complete checkpoints of the folder, those with damaged manifests, and the leftovers
// of killed saves. A local checkpoint that is being read stays until the next call. Never removes files that no save
// wrote.
void remove_old_checkpoints(const std::filesystem::path& folder, int keep);

// Protects a checkpoint from removal while it is read, by keep_last or by a save that replaces it. A no-op on storage
// without locks.
class ReadLock {
 public:
  explicit ReadLock(const std::filesystem::path& checkpoint);

  // Returns where the locked checkpoint is now if a save has replaced it at `checkpoint`; "" if it is there, or not
  // locked.
  std::filesystem::path moved_from(const std::filesystem::path& checkpoint) const;

 private:
  std::filesystem::path directory() const { return lock_.path().parent_path(); }
  FileLock lock_;
};

// Used by commit.cpp, one for each storage.
std::unique_ptr<PartialCheckpoint> begin_local_checkpoint(const std::filesystem::path& target,
                                                          const std::function<void()>& progress);
std::unique_ptr<PartialCheckpoint> begin_remote_checkpoint(const std::filesystem::path& target,
                                                           const std::function<void()>& progress);
// A no-op if another job has replaced the checkpoint, which then has another `sequence` (nullopt: a damaged one).
void remove_local_checkpoint(const std::filesystem::path& checkpoint, std::optional<int64_t> sequence);
void remove_remote_checkpoint(const std::filesystem::path& checkpoint);
void clear_local_leftovers(const std::filesystem::path& folder);
void clear_remote_leftovers(const std::filesystem::path& folder);
uint64_t draw_checkpoint_id();

}  // namespace tessera::internal
