#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::internal {

// What came of asking for a lock. kNoLocks: the file system has none, or the file cannot be opened so.
enum class LockOutcome : uint8_t { kTaken, kHeldByOther, kNoLocks };

// A lock on a file (F_OFD_SETLK), seen by other processes and, on network file systems, by other hosts: NFS passes such
// locks to its server, which the flock() of a directory is not. Gone with the object or the process. Move-only.
class FileLock {
 public:
  FileLock() = default;
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();

  // Asks once, without waiting, after letting go of what this held. A shared one needs a file that can be read, an
  // exclusive one a file that can be written. Throws nothing.
  LockOutcome take_shared(const std::filesystem::path& file) { return take(file, false); }
  LockOutcome take_exclusive(const std::filesystem::path& file) { return take(file, true); }
  void release();

 private:
  LockOutcome take(const std::filesystem::path& file, bool exclusive);
  int descriptor_ = -1;
};

// Who this process is, for others to read: "process 4711 on host.name".
std::string process_name();
// Whether the text is a process_name() of this host whose process has ended.
bool is_of_ended_process(const std::string& name);

}  // namespace tessera::internal
