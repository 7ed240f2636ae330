#include "checkpoint/storage/file_lock.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/runtime/file.h"
#include "core/runtime/host.h"

namespace tessera::internal {

void FileLock::release() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

LockOutcome FileLock::take(const std::filesystem::path& file, bool exclusive) {
  release();
  const int flags = (exclusive ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  descriptor_ = retried([&] { return ::open(file.c_str(), flags); });
  if (descriptor_ < 0) return LockOutcome::kNoLocks;
  struct flock whole {};
  whole.l_type = exclusive ? F_WRLCK : F_RDLCK;
  whole.l_whence = SEEK_SET;
  if (retried([&] { return ::fcntl(descriptor_, F_OFD_SETLK, &whole); }) == 0) return LockOutcome::kTaken;
  const int error = errno;
  release();
  return error == EAGAIN || error == EACCES ? LockOutcome::kHeldByOther : LockOutcome::kNoLocks;
}

std::filesystem::path FileLock::path() const {
  std::error_code error;
  return descriptor_ < 0 ? std::filesystem::path()
                         : std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor_), error);
}

// Names the PID namespace too, because containers with one host name may have equal process numbers.
static std::string host_and_pid_namespace() {
  std::error_code error;
  return host_name() + "/" + std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
}

std::string process_name() { return "process " + std::to_string(::getpid()) + " on " + host_and_pid_namespace(); }

bool is_of_ended_process(const std::string& name) {
  int process = 0, end = 0;
  if (std::sscanf(name.c_str(), "process %d on %n", &process, &end) != 1 || end == 0 || process <= 0) return false;
  return name.substr(static_cast<size_t>(end)) == host_and_pid_namespace() && ::kill(process, 0) != 0 && errno == ESRCH;
}

}  // namespace tessera::internal
