#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tessera::internal {

// Owns a descriptor of a file in memory, which processes of a host can share. The kernel keeps the file while any
// process has it open or mapped.
class MemoryFile {
 public:
  // A descriptor of -1 means that the file is not open.
  explicit MemoryFile(int descriptor = -1) : descriptor_(descriptor) {}
  MemoryFile(MemoryFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  MemoryFile& operator=(MemoryFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~MemoryFile();

  // Creates an empty file. The result is not open if the system refuses the file.
  static MemoryFile create(const char* name);
  // Creates a zeroed file of fixed size, so that reads cannot fault. Not open if the system or `ulimit -f` refuses.
  static MemoryFile create_fixed(const char* name, int64_t bytes);
  // Opens the file that another process described by notice(). `flags` are those of ::open(). The result is not open if
  // this fails, or if `notice` leads to another file: process ids differ between PID namespaces.
  static MemoryFile open(const std::string& notice, int flags);
  MemoryFile duplicate() const;  // the result is not open if the call fails

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // Whether the file has a fixed size of `bytes` or more.
  bool is_fixed_at(int64_t bytes) const;
  // Returns a path of the file in this process.
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
  // Returns the `notice` for open() in another process of this host: "<process> <descriptor> <device> <inode>".
  std::string notice() const;

 private:
  std::string identity() const;  // returns "<device> <inode>"

  int descriptor_;
};

}  // namespace tessera::internal
