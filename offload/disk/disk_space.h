#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {

// A file for pages, without a name in `directory`. Its failures are std::runtime_error that names the directory.
File offload_file(const std::string& directory);

// Space in such a file, by pieces of whole blocks. What is claimed is there: a full disk is found then, and a crash
// leaves nothing. Pieces that were given back are taken first, and neighbours among them are one. In a dry run there is
// no file. Used by one thread at a time.
class DiskSpace {
 public:
  // Throws std::runtime_error where no file can be made.
  explicit DiskSpace(const std::string& directory);

  // The offset of the piece. Throws std::runtime_error if the disk is full.
  int64_t claim(int64_t bytes);
  void give_back(int64_t offset, int64_t bytes);
  int64_t claimed_bytes() const { return claimed_bytes_; }  // at the time when they were most

  // What reads and writes it, from any thread; null in a dry run.
  const File* file() const { return file_ ? &*file_ : nullptr; }

 private:
  std::optional<File> file_;
  int64_t claimed_bytes_ = 0;                   // of the file
  std::vector<std::shared_ptr<void>> counted_;  // of those, by who counts them
  std::map<int64_t, int64_t> free_bytes_;       // of the file, by offset; no two are neighbours
};

}  // namespace tessera::internal
