#include "checkpoint/format/entries.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>

#include <tessera/errors.h>

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

// The error-message text of each FileAction, in the order of the enumeration.
constexpr const char* kDoing[] = {
    "creating",          "opening", "looking at", "reading", "writing", "writing to the disk", "setting the size of",
    "claiming space for"};

void throw_checkpoint_error(const FileFailure& failure) {
  const std::string doing = kDoing[static_cast<size_t>(failure.action)];
  const std::string text =
      failure.path.string() + ": " + (failure.problem.empty() ? doing + ": " + failure.reason() : failure.problem);
  const bool reads = failure.action == FileAction::kOpen || failure.action == FileAction::kLookAt ||
                     failure.action == FileAction::kRead;
  const bool is_without_reason = failure.error_number == 0 || !failure.problem.empty();
  const bool is_not_there = failure.error_number == ENOENT || failure.error_number == ENOTDIR;
  if (failure.is_unanswered || (reads && !is_without_reason && !is_not_there)) throw StorageUnavailable(text);
  throw CheckpointError(text);
}

}  // namespace

void fail_at(const fs::path& path, const std::string& action) {
  const int error_number = errno;
  throw CheckpointError(path.string() + ": " + action + ": " + std::generic_category().message(error_number));
}

const Storage& storage_of(const fs::path& path) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::string, std::unique_ptr<Storage>>;  // not destroyed: threads may outlive main()
  const std::string scheme = scheme_of(path);
  const std::lock_guard lock(mutex);
  auto& storage = all[scheme];
  if (!storage) storage = make_storage(path, &throw_checkpoint_error);
  return *storage;
}

File create_file(const fs::path& path) { return File::create(path, &throw_checkpoint_error); }
File open_file_to_write(const fs::path& path) { return File::open_to_write(path, &throw_checkpoint_error); }

void make_directories(const fs::path& directory) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return;
  make_directories(directory.parent_path());
  if (fs::create_directory(directory, error)) sync_directory(directory.parent_path());
  if (error) throw CheckpointError(directory.string() + ": creating: " + error.message());
}

void sync_directory(const fs::path& directory) {
  const int fd = retried([&] { return ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) fail_at(directory, "opening");
  const int error_number = retried([&] { return ::fsync(fd); }) == 0 ? 0 : errno;
  ::close(fd);
  errno = error_number;
  // Ignores EINVAL, which means that the file system does not support fsync for directories.
  if (errno != 0 && errno != EINVAL) fail_at(directory, "writing to the disk");
}

std::string read_text(const fs::path& path, int64_t max_bytes) {
  const auto file = open_file(path);
  const int64_t bytes = file->bytes();
  if (bytes > max_bytes)
    throw CheckpointError(path.string() + ": has " + std::to_string(bytes) + " bytes, more than the " +
                          std::to_string(max_bytes) + " expected at most");
  std::string text(static_cast<size_t>(bytes), '\0');
  file->read(text.data(), bytes, 0);
  return text;
}

std::string first_line(const fs::path& path) {
  constexpr int64_t kMostBytes = 4096;
  try {
    const std::string text = storage_of(path).beginning(path, kMostBytes);
    return text.substr(0, text.find('\n'));
  } catch (const CheckpointError&) {
    return "";
  }
}

void rename_entry(const fs::path& from, const fs::path& to, bool replace) {
  int result = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), replace ? 0 : RENAME_NOREPLACE);
  // If the file system lacks RENAME_NOREPLACE, uses rename(). It replaces a file, but not a non-empty directory.
  if (result != 0 && !replace && (errno == EINVAL || errno == ENOSYS)) result = ::rename(from.c_str(), to.c_str());
  if (result != 0) fail_at(to, "renaming " + from.string() + " to it");
}

std::string five_digits(int64_t number) {
  const std::string digits = std::to_string(number);
  return std::string(5 - std::min<size_t>(5, digits.size()), '0') + digits;
}

void exchange_entries(const fs::path& a, const fs::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS)
    throw CheckpointError(b.string() +
                          ": this file system cannot replace a directory in one step: save under a new name");
  fail_at(b, "exchanging it with " + a.string());
}

}  // namespace tessera::internal
