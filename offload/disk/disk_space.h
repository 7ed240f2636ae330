#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// Creates an unnamed file in `directory`. This function and later operations on the file throw std::runtime_error, with
// the directory's name, if they fail.
File offload_file(const std::string& directory);

// Allocates whole blocks in an unnamed file, which the system deletes even after a crash. claim() allocates disk space,
// so it detects a full disk. Merges and reuses freed pieces. A dry run has no file. Not thread-safe.
class DiskSpace {
 public:
  // Throws std::runtime_error if no file can be created.
  explicit DiskSpace(const std::string& directory);

  // Allocates `bytes` (whole blocks), and returns their offset. Throws std::runtime_error if the disk is full.
  int64_t claim(int64_t bytes);
  void free(int64_t offset, int64_t bytes);                 // the piece must be from claim()
  int64_t claimed_bytes() const { return claimed_bytes_; }  // size of the file, including free pieces

  // Returns the file, or null in a dry run. Any thread may call the file's const functions.
  const File* file() const { return file_ ? &*file_ : nullptr; }

 private:
  std::optional<File> file_;
  int64_t claimed_bytes_ = 0;                   // the size of the file
  std::vector<std::shared_ptr<void>> counted_;  // while they exist, memory reports include the claimed bytes
  std::map<int64_t, int64_t> free_bytes_;       // free pieces: bytes by offset; neighbours are merged
};

}  // namespace tessera::internal
