#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::internal {

enum class FileAction : uint8_t { kCreate, kOpen, kLookAt, kRead, kWrite, kSync, kResize, kClaim };

struct FileFailure {
  std::filesystem::path path;  // the file, or the folder of one without a name
  FileAction action;
  int error_number = 0;        // errno's, if the system gave a reason
  std::string problem;         // what is wrong, in words after the path, where errno's would not say it; else ""
  bool is_unanswered = false;  // a storage elsewhere did not answer: this says nothing of the file

  std::string reason() const;  // errno's in words
};

// Throws the failure as an error of whoever has the file: CheckpointError, say.
using ThrowFailure = void (*)(const FileFailure& failure);
// Calls it, and throws std::logic_error if it returns.
[[noreturn]] void throw_with(ThrowFailure throw_failure, const FileFailure& failure);

// An open file, read and written at given positions, all that was asked for or a failure. What is const is safe from
// several threads at a time. Move-only; closed at the end.
class File {
 public:
  // A new file; one that exists is refused.
  static File create(const std::filesystem::path& path, ThrowFailure fail);
  // A regular file that is there, for reading; a symbolic link is refused.
  static File open(const std::filesystem::path& path, ThrowFailure fail);
  // The same for writing parts of one that is there.
  static File open_to_write(const std::filesystem::path& path, ThrowFailure fail);
  // A new file in `directory` without a name: gone when it is closed, however the process ends. Reads and writes go
  // past the page cache (O_DIRECT) where the file system allows it: positions, lengths and addresses are whole blocks.
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
  // Fails if the file ends before.
  void read(void* data, int64_t bytes, int64_t position) const;
  // This very file, for reading, with a descriptor of its own, for which the system reads ahead on its own; nothing if
  // that cannot be had.
  std::optional<File> opened_again() const;
  // Asks the disk to begin with what was written there, so that sync() has less left to wait for.
  void start_writing_out(int64_t position, int64_t bytes) const;
  void sync() const;
  void resize(int64_t bytes) const;
  // Makes it `bytes` long, if it is shorter, with the disk's blocks for all of them, so that writing has none to look
  // for. Fails if the disk has no room; does nothing where the file system cannot.
  void reserve(int64_t bytes) const;
  // Claims `bytes` (whole blocks) more at the end, on the disk itself, and returns where they begin. Fails, with the
  // file as it was, if the disk has no room: says how much was asked for and how much is free.
  int64_t extend(int64_t bytes);

 private:
  File(std::filesystem::path path, int descriptor, ThrowFailure fail);
  static File open_named(const std::filesystem::path& path, int flags, FileAction action, ThrowFailure fail);
  [[noreturn]] void throw_failure(FileAction action, int error_number, std::string problem = "") const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  ThrowFailure throw_failure_;
  bool is_direct_ = false;
};

}  // namespace tessera::internal
