#include "tessera/checkpoint/entries.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

const char* doing(FileAction action) {
  switch (action) {
    case FileAction::kCreate:
      return "creating";
    case FileAction::kOpen:
      return "opening";
    case FileAction::kLookAt:
      return "looking at";
    case FileAction::kRead:
      return "reading";
    case FileAction::kWrite:
      return "writing";
    case FileAction::kSync:
      return "writing to the disk";
    case FileAction::kResize:
      return "setting the size of";
    case FileAction::kClaim:
      return "claiming space for";
  }
  return "using";
}

void throw_checkpoint_error(const FileFailure& failure) {
  throw CheckpointError(
      failure.path.string() + ": " +
      (failure.problem.empty() ? doing(failure.action) + (": " + failure.reason()) : failure.problem));
}

[[noreturn]] void fail_at(const std::filesystem::path& path, const std::string& action) {
  const int error_number = errno;
  throw CheckpointError(path.string() + ": " + action + ": " + std::generic_category().message(error_number));
}

}  // namespace

File create_file(const std::filesystem::path& path) { return File::create(path, &throw_checkpoint_error); }
File open_file(const std::filesystem::path& path) { return File::open(path, &throw_checkpoint_error); }
File open_file_to_write(const std::filesystem::path& path) {
  return File::open_to_write(path, &throw_checkpoint_error);
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
  const File file = open_file(path);
  const int64_t bytes = file.bytes();
  if (bytes > max_bytes)
    throw CheckpointError(path.string() + ": has " + std::to_string(bytes) + " bytes, more than the " +
                          std::to_string(max_bytes) + " expected at most");
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read(text.data(), bytes, 0);
  return text;
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const File file = create_file(path);
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
