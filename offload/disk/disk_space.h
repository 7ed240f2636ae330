#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// Creates an unnamed file in `directory`. If a file operation fails, it throws std::runtime_error, which names
// the directory.
File offload_file(const std::string& directory);

// Allocates whole blocks in an unnamed file, which a crash does not leave behind. Allocates claimed space on disk, so
// that claim() detects a full disk. Reuses and merges freed pieces. A dry run has no file. Not thread-safe.
class DiskSpace {
 public:
  // Throws std::runtime_error if no file can be created.
  explicit DiskSpace(const std::string& directory);

  // Returns the offset of the piece. Throws std::runtime_error if the disk is full.
  int64_t claim(int64_t bytes);
  void free(int64_t offset, int64_t bytes);
  int64_t claimed_bytes() const { return claimed_bytes_; }  // the file's size

  // Returns the file, usable from any thread; null in a dry run.
  const File* file() const { return file_ ? &*file_ : nullptr; }

 private:
  std::optional<File> file_;
  int64_t claimed_bytes_ = 0;                   // the size of the file
  std::vector<std::shared_ptr<void>> counted_;  // while it exists, the memory report counts these bytes
  std::map<int64_t, int64_t> free_bytes_;       // by offset in the file; neighbours are merged
};

}  // namespace tessera::internal
