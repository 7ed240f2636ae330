#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::internal {

// The result of a lock request. kNoLocks means that the file system has no locks, or that the file could not be opened.
enum class LockOutcome : uint8_t { kTaken, kHeldByOther, kNoLocks };

// A lock on a file (F_OFD_SETLK), visible to other processes and, on network file systems, to other hosts. A file is
// locked instead of its directory, because NFS does not send flock() of a directory to the server. The destructor or
// the end of the process releases the lock.
class FileLock {
 public:
  FileLock() = default;
  ~FileLock() { release(); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // Releases the held lock, if any, then tries once to lock `file`. Does not block or throw. The file must be readable
  // for a shared lock, and writable for an exclusive lock.
  LockOutcome take_shared(const std::filesystem::path& file) { return take(file, false); }
  LockOutcome take_exclusive(const std::filesystem::path& file) { return take(file, true); }
  void release();

  // Returns the current path of the locked file, which may have been renamed. Returns "" if no file is locked.
  std::filesystem::path path() const;

 private:
  LockOutcome take(const std::filesystem::path& file, bool exclusive);
  int descriptor_ = -1;
};

// Returns a text that identifies this process to other processes: "process 4711 on host.name/pid:[4026531836]",
// where the last part names the PID namespace.
std::string process_name();
// Returns whether `name` is the process_name() of a process of this host that has ended.
bool is_of_ended_process(const std::string& name);

}  // namespace tessera::internal
