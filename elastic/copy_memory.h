#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/memory/memory_file.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// Memory for a part. Other processes of the host map it as their copy, so that no data is sent. A mapping keeps it
// alive after the death of the process that wrote it.
class CopyMemory {
 public:
  // Allocates zeroed memory: shared if the system has shared memory, else private. Throws std::system_error on failure.
  explicit CopyMemory(int64_t bytes);
  // Maps the memory of another process for reading. Throws std::runtime_error if this process cannot reach it.
  explicit CopyMemory(const nlohmann::json& notice);
  ~CopyMemory();
  CopyMemory(const CopyMemory&) = delete;
  CopyMemory& operator=(const CopyMemory&) = delete;

  // Returns the notice by which other processes map this memory while this process lives; null if private or mapped.
  nlohmann::json notice() const;
  // Returns whether this object maps the memory of the notice.
  bool is_of(const nlohmann::json& notice) const { return !notice.is_null() && origin_ == notice; }
  int64_t bytes() const { return bytes_; }
  char* data() { return data_; }
  const char* data() const { return data_; }
  bool contains(const char* data, int64_t bytes) const;
  // Reserves the next `bytes` bytes for the caller to fill. Throws std::out_of_range if fewer bytes are left.
  char* reserve(int64_t bytes);
  void reserve_nothing() { reserved_ = 0; }

 private:
  void map(const MemoryFile& file, int access);

  const nlohmann::json origin_;  // the notice of mapped memory; null if allocated here
  const int64_t bytes_;
  const MemoryFile file_;  // not open if the memory is private or belongs to another process
  int64_t reserved_ = 0;
  char* data_ = nullptr;
};

// Reuses the memory of freed parts, because page faults in new memory take longer than the copy. Is thread-safe.
class CopyMemories {
 public:
  // Returns memory of this size that no part uses. The memory may be reused after its last reference is released.
  std::shared_ptr<CopyMemory> take(int64_t bytes);

 private:
  struct Unused {
    std::mutex mutex;
    std::vector<std::unique_ptr<CopyMemory>> all TESSERA_GUARDED_BY(mutex);
  };
  const std::shared_ptr<Unused> unused_ = std::make_shared<Unused>();
};

}  // namespace tessera::internal
