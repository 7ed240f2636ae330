#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "checkpoint/format/manifest.h"
#include "checkpoint/storage/file_lock.h"

namespace tessera::internal {

// How a directory becomes a checkpoint all at once (FORMAT.md, "How a checkpoint comes to be"): what rank 0 does.
// Nothing here is collective; everything throws CheckpointError.

// A checkpoint while it is written.
class PartialCheckpoint {
 public:
  // Makes the folder for the ranks' files, and clears away what dead saves of this target left. On a local path it is a
  // temporary one beside the target, whose parents are made; refused are a target that exists and is not a checkpoint,
  // damaged or not, or an empty directory, and one that this file system could not replace. On other storage it is one
  // in the target.
  // `progress` is told of each file that is cleared away.
  static std::unique_ptr<PartialCheckpoint> begin(
      const std::filesystem::path& target, const std::function<void()>& progress = [] {});
  // Removes what was not committed, or the checkpoint that was replaced; a local one that somebody reads is left.
  virtual ~PartialCheckpoint() = default;
  PartialCheckpoint(const PartialCheckpoint&) = delete;
  PartialCheckpoint& operator=(const PartialCheckpoint&) = delete;

  // Where the ranks write. It has a file named kDraftName.
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path folder() const { return target_.parent_path(); }
  uint64_t id() const { return id_; }

  // Checks that the manifest's slices are the whole of every tensor, and writes it: all becomes the target in one step.
  // Sets the manifest's id and sequence. A checkpoint that was there is removed by the destructor; what else its folder
  // had, the user's own, is then in the new one.
  virtual void commit(Manifest manifest) = 0;

 protected:
  explicit PartialCheckpoint(const std::filesystem::path& target);
  // Sets id and sequence, and checks.
  void complete(Manifest& manifest) const;

  const std::filesystem::path target_;
  std::filesystem::path path_;
  const uint64_t id_;
  bool is_committed_ = false;
};

constexpr char kDraftName[] = ".manifest";  // what says that a save is under way, and whose
// In the name of a local one's temporary directory, which begins with a dot.
constexpr char kSaving[] = ".saving-";
constexpr char kMaking[] = ".making-";  // instead, until it is locked

// Removes all but the newest `keep` complete checkpoints of the folder, those whose manifests are damaged first, and
// what dead saves left; a local one that somebody reads is left for the next time. What no save has written stays in
// the folder that it is in.
void remove_old_checkpoints(const std::filesystem::path& folder, int keep);

// Keeps a checkpoint where it is while it is read: nobody removes it for keep_last meanwhile, nor, where it was
// replaced, its files. On a file system or a storage without locks it does nothing.
class ReadLock {
 public:
  explicit ReadLock(const std::filesystem::path& checkpoint);

 private:
  FileLock lock_;
};

// Of commit.cpp, by storage.
std::unique_ptr<PartialCheckpoint> begin_local_checkpoint(const std::filesystem::path& target,
                                                          const std::function<void()>& progress);
std::unique_ptr<PartialCheckpoint> begin_remote_checkpoint(const std::filesystem::path& target,
                                                           const std::function<void()>& progress);
void remove_local_checkpoint(const std::filesystem::path& checkpoint);
void remove_remote_checkpoint(const std::filesystem::path& checkpoint);
void clear_local_leftovers(const std::filesystem::path& folder);
void clear_remote_leftovers(const std::filesystem::path& folder);
uint64_t draw_checkpoint_id();

}  // namespace tessera::internal
