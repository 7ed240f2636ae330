#pragma once

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace tessera::internal {

// Repeats a system call that a signal interrupted. Must not be used for close(), which always frees the descriptor.
template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// List a folder (in no order), and remove a path with its contents. On failure, set `error`. If a signal interrupts a
// system call, begin again, whereas std::filesystem's functions fail.
std::vector<std::filesystem::directory_entry> entries_of(const std::filesystem::path& folder, std::error_code& error);
void remove_all_of(const std::filesystem::path& path, std::error_code& error);

enum class FileAction : uint8_t { kCreate, kOpen, kLookAt, kRead, kWrite, kSync, kResize, kClaim };

struct FileFailure {
  std::filesystem::path path;  // the file, or the folder of an unnamed file
  FileAction action;
  int error_number = 0;        // errno; 0 if there is none
  std::string problem;         // the error text after the path, if errno does not describe the problem; else ""
  bool is_unanswered = false;  // a remote storage did not answer, so the file may be intact

  std::string reason() const;  // the text of `error_number`
};

// Throws `failure` as an exception type that the user of the file chooses, such as CheckpointError.
using ThrowFailure = void (*)(const FileFailure& failure);
// Calls `throw_failure`. Throws std::logic_error if that function returns.
[[noreturn]] void throw_with(ThrowFailure throw_failure, const FileFailure& failure);

// An open file. Reads and writes are at a given position, and transfer all bytes or fail. Failures are thrown by its
// ThrowFailure. const functions are thread-safe. Move-only; the destructor closes the file.
class File {
 public:
  // Creates a file. Fails if it exists.
  static File create(const std::filesystem::path& path, ThrowFailure fail);
  // Opens an existing regular file for reading. Fails for a symbolic link.
  static File open(const std::filesystem::path& path, ThrowFailure fail);
  // Opens an existing file for writing. Fails for a symbolic link.
  static File open_to_write(const std::filesystem::path& path, ThrowFailure fail);
  // Creates an unnamed file in `directory`. The file is deleted when it is closed or the process ends. If the file
  // system allows O_DIRECT, is_direct() is true: reads and writes bypass the page cache, and their positions, lengths
  // and addresses must be multiples of kBlockBytes.
  static File create_unnamed(const std::filesystem::path& directory, ThrowFailure fail);

  static constexpr int64_t kBlockBytes = 4096;
  static int64_t whole_blocks(int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  bool is_direct() const { return is_direct_; }
  int64_t bytes() const;
  void write(const void* data, int64_t bytes, int64_t position) const;
  // Fails if the file ends before position + bytes.
  void read(void* data, int64_t bytes, int64_t position) const;
  // Opens the same file again for reading, with a separate descriptor and read-ahead; nullopt if that fails.
  std::optional<File> opened_again() const;
  // Starts writing these bytes to the disk, which shortens sync().
  void start_writing_out(int64_t position, int64_t bytes) const;
  void sync() const;
  void resize(int64_t bytes) const;
  // Extends the file to `bytes`, if it is shorter, and allocates its blocks, which makes writes faster. Fails if the
  // disk is full. Is a no-op if the file system does not support allocation.
  void reserve(int64_t bytes) const;
  // Allocates `bytes` bytes (whole blocks) on the disk at the end of the file, and returns their position. If the disk
  // is full, fails with the requested and the free bytes, and leaves the file unchanged.
  int64_t extend(int64_t bytes);
  // Extends an empty file to `bytes` bytes (whole blocks, above 0) and returns its mapped memory, which may outlive
  // this object. If the system is short of memory, the kernel writes the mapped memory to the file.
  std::shared_ptr<void> map_new(int64_t bytes);

 private:
  File(std::filesystem::path path, int descriptor, ThrowFailure fail);
  static File open_named(const std::filesystem::path& path, int flags, FileAction action, ThrowFailure fail);
  [[noreturn]] void throw_failure(FileAction action, int error_number, std::string problem = "") const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  ThrowFailure throw_failure_;
  bool is_direct_ = false;
};

// The result of append_all().
struct Appended {
  int error_number = 0;  // errno of the failed write, or 0 if all bytes were written
  bool is_whole = true;  // false if the file ends with an incomplete part of the bytes
};

// Appends bytes to a file that is open for appending and has `before_bytes` bytes. If a write fails, truncates the file
// to `before_bytes`, so that readers find no incomplete record. If the truncation also fails, `is_whole` is false.
Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept;

}  // namespace tessera::internal
