#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

// An open file, read and written at given positions. Every failure throws CheckpointError with the
// path and the system's reason. One thread at a time.
class File {
 public:
  // A new file; one that exists is refused.
  static File create(const std::filesystem::path& path);
  // A regular file that is there; a symbolic link is refused.
  static File open(const std::filesystem::path& path);
  // The same for writing parts of one that is there.
  static File open_to_write(const std::filesystem::path& path);

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  int64_t bytes() const;
  void write(const void* data, int64_t bytes, int64_t position) const;
  // Throws if the file ends before.
  void read(void* data, int64_t bytes, int64_t position) const;
  // Asks the disk to fetch what will be read soon: it works while the caller does something else.
  void start_reading(int64_t position, int64_t bytes) const;
  // Asks the disk to begin with what was written there, so that sync() has less left to wait for.
  void start_writing_out(int64_t position, int64_t bytes) const;
  void sync() const;
  void resize(int64_t bytes) const;

 private:
  File(std::filesystem::path path, int flags);
  [[noreturn]] void fail(const char* doing) const;

  std::filesystem::path path_;
  int fd_ = -1;
};

// fsync of a directory: makes its entries durable.
void sync_directory(const std::filesystem::path& directory);

// A whole small file at once: reading refuses one of more than max_bytes; writing makes a new file
// and syncs it.
std::string read_text(const std::filesystem::path& path, int64_t max_bytes);
void write_text(const std::filesystem::path& path, std::string_view text);

// Renames, over a file that is there if `replace`; else an existing target is an error.
void rename_entry(const std::filesystem::path& from, const std::filesystem::path& to, bool replace);
// Exchanges two directory entries in one step.
void exchange_entries(const std::filesystem::path& a, const std::filesystem::path& b);

// A number as names of files have it: 42 is "00042".
std::string five_digits(int64_t number);

// What errno says.
std::string system_error_text(int error_number);

}  // namespace tessera
