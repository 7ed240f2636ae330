#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// Creates an unnamed file in `directory`. This function, and later operations on the file, throw std::runtime_error
// with the name of the directory if they fail.
File offload_file(const std::string& directory);

// Allocates whole blocks in an unnamed file, which a crash does not leave behind. claim() allocates space on the disk,
// so it detects a full disk. Merges and reuses freed pieces. A dry run has no file. Not thread-safe.
class DiskSpace {
 public:
  // Throws std::runtime_error if no file can be created.
  explicit DiskSpace(const std::string& directory);

  // Allocates `bytes`, and returns their offset in the file. Throws std::runtime_error if the disk is full.
  int64_t claim(int64_t bytes);
  void free(int64_t offset, int64_t bytes);
  int64_t claimed_bytes() const { return claimed_bytes_; }  // size of the file, free pieces included

  // Returns the file, whose const functions any thread may call; null in a dry run.
  const File* file() const { return file_ ? &*file_ : nullptr; }

 private:
  std::optional<File> file_;
  int64_t claimed_bytes_ = 0;                   // the size of the file
  std::vector<std::shared_ptr<void>> counted_;  // while these exist, memory reports count the claimed bytes
  std::map<int64_t, int64_t> free_bytes_;       // free pieces: bytes by offset; neighbours are merged
};

}  // namespace tessera::internal
