#pragma once

#include <filesystem>
#include <memory>

namespace tessera {

namespace internal {
class FileLock;
}

// A lock that gives one job exclusive use of a folder, such as its output folder; the job's rank 0 holds it. The lock
// is a file ".tessera.lock", which names its holder and is never removed. Not collective.
class FolderLock {
 public:
  // Creates the folder if it is missing. Throws CheckpointError with process, host and file if another job holds the
  // lock. On a file system without locks the file's text decides: a dead process of this host does not count; the file
  // of any other must be removed by hand.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  std::filesystem::path file_;
  std::unique_ptr<internal::FileLock> lock_;
};

}  // namespace tessera
