#pragma once

#include <cstdint>
#include <string>

namespace tessera {

// A file without a name in a directory: it is gone when its last descriptor is closed, however the
// process ends. Reads and writes go past the page cache where the file system allows it (O_DIRECT).
// Safe from several threads at a time.
class DiskFile {
 public:
  // What offsets, lengths and memory are multiples of.
  static constexpr int64_t kBlockBytes = 4096;
  static int64_t whole_blocks(int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

  // Throws std::runtime_error that names the directory if no file can be made there.
  explicit DiskFile(std::string directory);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  // Claims `bytes` (whole blocks) more at the end, on the disk and not only in name, and returns where
  // they begin. Throws std::runtime_error, with the file as it was, if the disk has no room: says how
  // much was asked for and how much is free.
  int64_t extend(int64_t bytes);
  int64_t bytes() const { return bytes_; }

  // All of it, or std::runtime_error with the system's reason.
  void read(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes, int64_t offset) const;

  bool is_direct() const { return is_direct_; }
  const std::string& directory() const { return directory_; }

 private:
  [[noreturn]] void fail(const char* operation, int error) const;

  const std::string directory_;
  int descriptor_ = -1;
  bool is_direct_ = true;
  int64_t bytes_ = 0;
};

}  // namespace tessera
