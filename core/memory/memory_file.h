#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tessera::internal {

// Owns a descriptor of a file in memory, which processes of a host can share. The kernel keeps the file while any of
// them has it open or mapped.
class MemoryFile {
 public:
  // `descriptor` -1: not open.
  explicit MemoryFile(int descriptor = -1) : descriptor_(descriptor) {}
  MemoryFile(MemoryFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  MemoryFile& operator=(MemoryFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~MemoryFile();

  // An empty file. Not open if the system refuses it.
  static MemoryFile create(const char* name);
  // A file of zeros whose size is fixed, so that no reader faults. Not open if the system or `ulimit -f` refuses it.
  static MemoryFile create_fixed(const char* name, int64_t bytes);
  // Opens the file of a notice, with the flags of open(). Not open if it fails or finds another file: process ids
  // differ between PID namespaces.
  static MemoryFile open(const std::string& notice, int flags);
  MemoryFile duplicate() const;  // not open if it fails

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // Whether the file has a fixed size of this many bytes or more.
  bool is_fixed_at(int64_t bytes) const;
  // A path in this process.
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
  // The text by which another process of the host opens it: "<process> <descriptor> <device> <inode>".
  std::string notice() const;

 private:
  std::string identity() const;  // "<device> <inode>"

  int descriptor_;
};

}  // namespace tessera::internal
