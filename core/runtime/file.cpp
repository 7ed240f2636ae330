#include "core/runtime/file.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <stdexcept>
#include <system_error>
#include <utility>

namespace tessera::internal {
namespace {

constexpr int kMode = 0666;
constexpr int kPrivateMode = 0600;

// Opens an unnamed file (O_TMPFILE). If that is not supported, opens a named file and unlinks it at once.
int open_unnamed(const std::string& directory, int flags) {
  const int descriptor =
      retried([&] { return ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, kPrivateMode); });
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  std::string name = directory + "/tessera-XXXXXX";
  const int named = retried([&] {
    name.replace(name.size() - 6, 6, "XXXXXX");
    return ::mkostemp(name.data(), O_CLOEXEC | flags);
  });
  if (named >= 0 || errno == EINVAL) ::unlink(name.c_str());  // without O_DIRECT, the kernel fails after it made a file
  return named;
}

}  // namespace

std::vector<std::filesystem::directory_entry> entries_of(const std::filesystem::path& folder, std::error_code& error) {
  std::vector<std::filesystem::directory_entry> entries;
  do {
    entries.clear();
    for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
      entries.push_back(*entry);
  } while (error == std::errc::interrupted);
  return entries;
}

void remove_all_of(const std::filesystem::path& path, std::error_code& error) {
  do {
    std::filesystem::remove_all(path, error);
  } while (error == std::errc::interrupted);
}

void throw_with(ThrowFailure throw_failure, const FileFailure& failure) {
  throw_failure(failure);
  throw std::logic_error(failure.path.string() + ": a failure that was not thrown");
}

std::string FileFailure::reason() const { return std::generic_category().message(error_number); }

File::File(std::filesystem::path path, int descriptor, ThrowFailure fail)
    : path_(std::move(path)), descriptor_(descriptor), throw_failure_(fail) {}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      throw_failure_(other.throw_failure_),
      is_direct_(other.is_direct_) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::throw_failure(FileAction action, int error_number, std::string problem) const {
  throw_with(throw_failure_, {path_, action, error_number, std::move(problem)});
}

File File::open_named(const std::filesystem::path& path, int flags, FileAction action, ThrowFailure fail) {
  const int descriptor = retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, kMode); });
  const int error_number = errno;
  if (descriptor < 0) throw_with(fail, {path, action, error_number, error_number == ELOOP ? "is a symbolic link" : ""});
  return File(path, descriptor, fail);
}

File File::create(const std::filesystem::path& path, ThrowFailure fail) {
  return open_named(path, O_RDWR | O_CREAT | O_EXCL, FileAction::kCreate, fail);
}

File File::open(const std::filesystem::path& path, ThrowFailure fail) {
  File file = open_named(path, O_RDONLY | O_NONBLOCK, FileAction::kOpen, fail);  // O_NONBLOCK: do not block on a pipe
  struct stat status {};
  if (::fstat(file.descriptor_, &status) != 0) file.throw_failure(FileAction::kLookAt, errno);
  if (!S_ISREG(status.st_mode)) file.throw_failure(FileAction::kOpen, 0, "is not a regular file");
  return file;
}

File File::open_to_write(const std::filesystem::path& path, ThrowFailure fail) {
  return open_named(path, O_RDWR, FileAction::kOpen, fail);
}

File File::create_unnamed(const std::filesystem::path& directory, ThrowFailure fail) {
  int descriptor = open_unnamed(directory.string(), O_DIRECT);
  const bool is_direct = descriptor >= 0;
  if (!is_direct && errno == EINVAL) descriptor = open_unnamed(directory.string(), 0);  // tmpfs has no O_DIRECT
  const int error_number = errno;
  if (descriptor < 0) throw_with(fail, {directory, FileAction::kCreate, error_number, ""});
  File file(directory, descriptor, fail);
  file.is_direct_ = is_direct;
  return file;
}

int64_t File::bytes() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) throw_failure(FileAction::kLookAt, errno);
  return status.st_size;
}

void File::write(const void* data, int64_t bytes, int64_t position) const {
  const char* from = static_cast<const char*>(data);
  constexpr int kMostEmpty = 8;
  for (int64_t done = 0, empty = 0; done < bytes;) {
    const ssize_t written =
        retried([&] { return ::pwrite(descriptor_, from + done, static_cast<size_t>(bytes - done), position + done); });
    if (written < 0) throw_failure(FileAction::kWrite, errno);
    if (written == 0 && ++empty == kMostEmpty)
      throw_failure(FileAction::kWrite, EIO, c10::str("takes no bytes at ", position + done, ", and gives no reason"));
    done += written;
  }
}

void File::read(void* data, int64_t bytes, int64_t position) const {
  char* to = static_cast<char*>(data);
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got =
        retried([&] { return ::pread(descriptor_, to + done, static_cast<size_t>(bytes - done), position + done); });
    if (got < 0) throw_failure(FileAction::kRead, errno);
    if (got == 0)
      throw_failure(FileAction::kRead, EIO,
                    c10::str("ends at byte ", position + done, ", ", bytes - done, " bytes early"));
    done += got;
  }
}

std::optional<File> File::opened_again() const {
  // Opens the file by its descriptor, because the name may belong to another file by now.
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor_);
  const int descriptor = retried([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  return descriptor < 0 ? std::nullopt : std::optional<File>(File(path_, descriptor, throw_failure_));
}

void File::start_writing_out(int64_t position, int64_t bytes) const {
  ::sync_file_range(descriptor_, position, bytes, SYNC_FILE_RANGE_WRITE);  // only a hint: sync() reports errors
}

void File::sync() const {
  if (retried([&] { return ::fsync(descriptor_); }) != 0) throw_failure(FileAction::kSync, errno);
}

void File::resize(int64_t bytes) const {
  if (retried([&] { return ::ftruncate(descriptor_, bytes); }) != 0) throw_failure(FileAction::kResize, errno);
}

void File::reserve(int64_t bytes) const {
  const int result = retried([&] { return ::fallocate(descriptor_, 0, 0, bytes); });
  // Does not use posix_fallocate(), which writes blocks if the file system does not support allocation.
  if (result != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO))
    throw_failure(FileAction::kWrite, errno);
}

std::shared_ptr<void> File::map_new(int64_t bytes) {
  extend(bytes);
  const auto length = static_cast<size_t>(bytes);
  void* const memory = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) throw_failure(FileAction::kClaim, errno);
  return {memory, [length](void* mapped) { ::munmap(mapped, length); }};
}

int64_t File::extend(int64_t bytes) {
  if (bytes % kBlockBytes != 0) throw std::logic_error(c10::str("File::extend: ", bytes, " bytes are no whole blocks"));
  const int64_t begin = this->bytes();
  if (bytes == 0) return begin;
  struct statvfs room {};
  const int64_t free_bytes =
      ::fstatvfs(descriptor_, &room) == 0 ? static_cast<int64_t>(room.f_bavail * room.f_frsize) : INT64_MAX;
  // Checks the free space first: a partial allocation would take space from other processes.
  int error = ENOSPC;
  if (free_bytes >= bytes) do {
      error = ::posix_fallocate(descriptor_, begin, bytes);
    } while (error == EINTR);
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) {
    (void)!retried([&] { return ::ftruncate(descriptor_, begin); });
    throw_failure(FileAction::kClaim, error,
                  c10::str("has no room: ", bytes, " bytes more asked for, ", begin, " in use, ", free_bytes, " free (",
                           std::generic_category().message(error), ")"));
  }
  if (error != 0) throw_failure(FileAction::kClaim, error);
  return begin;
}

Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept {
  Appended appended;
  size_t done = 0;
  while (done < bytes.size() && appended.error_number == 0) {
    const ssize_t written = retried([&] { return ::write(descriptor, bytes.data() + done, bytes.size() - done); });
    if (written > 0)
      done += static_cast<size_t>(written);
    else
      appended.error_number = written == 0 ? ENOSPC : errno;
  }
  if (appended.error_number != 0) appended.is_whole = done == 0 || ::ftruncate(descriptor, before_bytes) == 0;
  return appended;
}

}  // namespace tessera::internal
