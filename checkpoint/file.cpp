#include "tessera/checkpoint/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

constexpr int kMode = 0666;

[[noreturn]] void fail_at(const std::filesystem::path& path, const std::string& doing) {
  const int error_number = errno;
  throw CheckpointError(path.string() + ": " + doing + ": " + system_error_text(error_number));
}

}  // namespace

std::string system_error_text(int error_number) { return std::generic_category().message(error_number); }

File::File(std::filesystem::path path, int flags)
    : path_(std::move(path)), fd_(::open(path_.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, kMode)) {
  if (fd_ < 0 && errno == ELOOP) throw CheckpointError(path_.string() + ": is a symbolic link");
  if (fd_ < 0) fail((flags & O_CREAT) != 0 ? "creating" : "opening");
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File File::create(const std::filesystem::path& path) { return File(path, O_RDWR | O_CREAT | O_EXCL); }

File File::open(const std::filesystem::path& path) {
  File file(path, O_RDONLY | O_NONBLOCK);  // not to hang on a pipe
  struct stat status {};
  if (::fstat(file.fd_, &status) != 0) file.fail("looking at");
  if (!S_ISREG(status.st_mode)) throw CheckpointError(path.string() + ": is not a regular file");
  return file;
}

File File::open_to_write(const std::filesystem::path& path) { return File(path, O_RDWR); }

void File::fail(const char* doing) const { fail_at(path_, doing); }

int64_t File::bytes() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail("looking at");
  return status.st_size;
}

void File::write(const void* data, int64_t bytes, int64_t position) const {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(fd_, from, static_cast<size_t>(bytes), position);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("writing");
    from += written;
    bytes -= written;
    position += written;
  }
}

void File::read(void* data, int64_t bytes, int64_t position) const {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_, to, static_cast<size_t>(bytes), position);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("reading");
    if (got == 0)
      throw CheckpointError(path_.string() + ": ends at byte " + std::to_string(position) + ", " +
                            std::to_string(bytes) + " bytes early");
    to += got;
    bytes -= got;
    position += got;
  }
}

void File::start_reading(int64_t position, int64_t bytes) const {
  ::posix_fadvise(fd_, position, bytes, POSIX_FADV_WILLNEED);  // only a hint
}

void File::start_writing_out(int64_t position, int64_t bytes) const {
  ::sync_file_range(fd_, position, bytes, SYNC_FILE_RANGE_WRITE);  // only a hint: errors come from sync()
}

void File::sync() const {
  if (::fsync(fd_) != 0) fail("writing to the disk");
}

void File::resize(int64_t bytes) const {
  if (::ftruncate(fd_, bytes) != 0) fail("setting the size of");
}

void sync_directory(const std::filesystem::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_at(directory, "opening");
  const int result = ::fsync(fd);
  const int error_number = errno;
  ::close(fd);
  errno = error_number;
  // Some file systems have no fsync for directories.
  if (result != 0 && errno != EINVAL) fail_at(directory, "writing to the disk");
}

std::string read_text(const std::filesystem::path& path, int64_t max_bytes) {
  const File file = File::open(path);
  const int64_t bytes = file.bytes();
  if (bytes > max_bytes)
    throw CheckpointError(path.string() + ": has " + std::to_string(bytes) + " bytes, more than the " +
                          std::to_string(max_bytes) + " expected at most");
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read(text.data(), bytes, 0);
  return text;
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const File file = File::create(path);
  file.write(text.data(), static_cast<int64_t>(text.size()), 0);
  file.sync();
}

void rename_entry(const std::filesystem::path& from, const std::filesystem::path& to, bool replace) {
  int result = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), replace ? 0 : RENAME_NOREPLACE);
  // A file system without RENAME_NOREPLACE: plain rename still refuses a directory with entries.
  if (result != 0 && !replace && (errno == EINVAL || errno == ENOSYS)) result = ::rename(from.c_str(), to.c_str());
  if (result != 0) fail_at(to, "renaming " + from.string() + " to it");
}

std::string five_digits(int64_t number) {
  std::string digits = std::to_string(number);
  while (digits.size() < 5) digits.insert(digits.begin(), '0');
  return digits;
}

void exchange_entries(const std::filesystem::path& a, const std::filesystem::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS)
    throw CheckpointError(b.string() +
                          ": this file system cannot replace a directory in one step: save under a new name");
  fail_at(b, "exchanging it with " + a.string());
}

}  // namespace tessera
