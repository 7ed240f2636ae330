// A library for LD_PRELOAD whose file calls are interrupted, short, or fail. Only for regular files below the folder
// TESSERA_FAULTS_FOLDER; the environment gives the rest:
//
//   TESSERA_FAULTS_SEED      of the draws, which also depend on RANK
//   TESSERA_FAULTS_EINTR     percent of calls that fail with EINTR
//   TESSERA_FAULTS_SHORT     percent of reads and writes that transfer a part
//   TESSERA_FAULTS_NUMBER    the call that fails, counted from 1, with the errno TESSERA_FAULTS_ERROR
//   TESSERA_FAULTS_LASTING   1: all later calls fail, too
//   TESSERA_FAULTS_READS     1: only calls that read count for NUMBER; 0: only calls that change files

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

int64_t number_of(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoll(text);
}

struct Faults {
  std::string folder = std::getenv("TESSERA_FAULTS_FOLDER") == nullptr ? "" : std::getenv("TESSERA_FAULTS_FOLDER");
  uint64_t seed = static_cast<uint64_t>(number_of("TESSERA_FAULTS_SEED") * 64 + number_of("RANK"));
  uint64_t eintr = static_cast<uint64_t>(number_of("TESSERA_FAULTS_EINTR"));
  uint64_t partial = static_cast<uint64_t>(number_of("TESSERA_FAULTS_SHORT"));
  int64_t number = number_of("TESSERA_FAULTS_NUMBER");
  int error = static_cast<int>(number_of("TESSERA_FAULTS_ERROR"));
  bool is_lasting = number_of("TESSERA_FAULTS_LASTING") != 0, reads = number_of("TESSERA_FAULTS_READS") != 0;
  std::atomic<int64_t> calls{0}, counted{0};
};

Faults& faults() {
  static auto* const own = new Faults();
  return *own;
}

// splitmix64 of the number of the call: threads need no lock.
uint64_t draw() {
  uint64_t x = faults().seed * 0x9E3779B97F4A7C15U + static_cast<uint64_t>(++faults().calls) * 0xD1B54A32D192ED03U;
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBU;
  return x ^ x >> 31U;
}

bool is_below(const char* path) { return !faults().folder.empty() && std::string(path).rfind(faults().folder, 0) == 0; }

bool is_below(int fd) {
  if (faults().folder.empty()) return false;
  char path[4096];
  const ssize_t bytes =
      ::syscall(SYS_readlink, ("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof(path) - 1);
  if (bytes < 0) return false;
  path[bytes] = '\0';
  return is_below(path);
}

// Returns whether the call fails; sets errno.
bool fails(bool is_read, bool may_be_interrupted) {
  Faults& own = faults();
  if (may_be_interrupted && draw() % 100 < own.eintr) return errno = EINTR, true;
  if (own.number == 0 || is_read != own.reads) return false;
  const int64_t number = ++own.counted;
  if (number != own.number && !(own.is_lasting && number > own.number)) return false;
  return errno = own.error, true;
}

size_t part_of(size_t bytes) { return bytes > 1 && draw() % 100 < faults().partial ? 1 + draw() % (bytes - 1) : bytes; }

int result_of(long result) { return static_cast<int>(result); }

}  // namespace

extern "C" {

ssize_t pread(int fd, void* to, size_t bytes, off_t position) {
  if (is_below(fd)) {
    if (fails(true, true)) return -1;
    bytes = part_of(bytes);
  }
  return ::syscall(SYS_pread64, fd, to, bytes, position);
}
ssize_t pread64(int fd, void* to, size_t bytes, off64_t position) { return pread(fd, to, bytes, position); }

ssize_t read(int fd, void* to, size_t bytes) {
  if (is_below(fd)) {
    if (fails(true, true)) return -1;
    bytes = part_of(bytes);
  }
  return ::syscall(SYS_read, fd, to, bytes);
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t position) {
  if (is_below(fd)) {
    if (fails(false, true)) return -1;
    bytes = part_of(bytes);
  }
  return ::syscall(SYS_pwrite64, fd, from, bytes, position);
}
ssize_t pwrite64(int fd, const void* from, size_t bytes, off64_t position) { return pwrite(fd, from, bytes, position); }

ssize_t write(int fd, const void* from, size_t bytes) {
  if (is_below(fd)) {
    if (fails(false, true)) return -1;
    bytes = part_of(bytes);
  }
  return ::syscall(SYS_write, fd, from, bytes);
}

int fsync(int fd) { return is_below(fd) && fails(false, true) ? -1 : result_of(::syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { return is_below(fd) && fails(false, true) ? -1 : result_of(::syscall(SYS_fdatasync, fd)); }

int ftruncate(int fd, off_t bytes) noexcept {
  return is_below(fd) && fails(false, true) ? -1 : result_of(::syscall(SYS_ftruncate, fd, bytes));
}
int ftruncate64(int fd, off64_t bytes) noexcept { return ftruncate(fd, bytes); }

int fallocate(int fd, int mode, off_t position, off_t bytes) {
  return is_below(fd) && fails(false, true) ? -1 : result_of(::syscall(SYS_fallocate, fd, mode, position, bytes));
}
int fallocate64(int fd, int mode, off64_t position, off64_t bytes) { return fallocate(fd, mode, position, bytes); }

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const bool changes = (flags & (O_WRONLY | O_RDWR)) != 0;
  if (is_below(path) && fails(!changes, true)) return -1;
  return result_of(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (is_below(path) && fails((flags & (O_WRONLY | O_RDWR)) == 0, true)) return -1;
  return result_of(::syscall(SYS_openat, folder, path, flags, mode));
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return open(path, flags, mode);
}

int rename(const char* from, const char* to) noexcept {
  return is_below(to) && fails(false, false) ? -1
                                             : result_of(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (is_below(to) && fails(false, false)) return -1;
  return result_of(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}
int mkdir(const char* path, mode_t mode) noexcept {
  return is_below(path) && fails(false, false) ? -1 : result_of(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

}  // extern "C"
