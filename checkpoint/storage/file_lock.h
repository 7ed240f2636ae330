#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::internal {

// The result of a lock request. kNoLocks: the file system has no locks, or the file cannot be opened.
enum class LockOutcome : uint8_t { kTaken, kHeldByOther, kNoLocks };

// A lock on a file (F_OFD_SETLK), visible to other processes and, on network file systems, to other hosts. NFS forwards
// such locks to its server, but does not forward flock() of a directory. Released by the destructor or the end of the
// process. Move-only.
class FileLock {
 public:
  FileLock() = default;
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();

  // Release the held lock, then try once to lock the file, without blocking. A shared lock needs a readable file, an
  // exclusive lock a writable file. Do not throw.
  LockOutcome take_shared(const std::filesystem::path& file) { return take(file, false); }
  LockOutcome take_exclusive(const std::filesystem::path& file) { return take(file, true); }
  void release();

  // Returns the current path of the locked file, even if it was renamed; "" if no file is locked.
  std::filesystem::path path() const;

 private:
  LockOutcome take(const std::filesystem::path& file, bool exclusive);
  int descriptor_ = -1;
};

// Identifies this process to others: "process 4711 on host.name".
std::string process_name();
// Returns whether the text is a process_name() of this host whose process has ended.
bool is_of_ended_process(const std::string& name);

}  // namespace tessera::internal
