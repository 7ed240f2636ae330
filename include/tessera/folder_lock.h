#pragma once

#include <filesystem>
#include <memory>

namespace tessera {

namespace internal {
class FileLock;
}

// One job at a time works in a folder, an output folder say: its rank 0 holds this from its start to its end. The lock
// is a file ".tessera.lock" there, which stays, and says who has it. Not collective.
class FolderLock {
 public:
  // Makes the folder where it is not there. Throws CheckpointError, which names process, host and file, if another job
  // has the folder. On a file system without locks the file's text decides: one of a process of this host that has
  // ended counts for nothing, any other one has to be removed by hand.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  std::filesystem::path file_;
  std::unique_ptr<internal::FileLock> lock_;
};

}  // namespace tessera
