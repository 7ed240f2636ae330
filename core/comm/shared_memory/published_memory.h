#pragma once

#include <cstdint>

namespace tessera::internal {

// Memory that a rank has announced to another one which is a thread of the same process. What stands on the board that
// they share, where others may write, is a number and not an address: who follows it finds the memory here, if it has
// been published, is still, and is meant to be read or written so. A process's memory is reached by its addresses, and
// only through the kernel (process_vm_readv), which follows none that is not its.
//
// It is published for as long as this lives; moved, not copied. Thread-safe but for one object.
class PublishedMemory {
 public:
  PublishedMemory() = default;  // none
  PublishedMemory(void* data, uint64_t bytes, bool is_written);
  PublishedMemory(PublishedMemory&& other) noexcept;
  PublishedMemory& operator=(PublishedMemory&& other) noexcept;
  ~PublishedMemory();

  uint64_t number() const { return number_; }  // unlike all others of this process; 0 for none

  // Throws std::runtime_error if no memory of that many bytes is published under the number, or to be written, not
  // read.
  static void* find(uint64_t number, uint64_t bytes, bool to_write);

 private:
  uint64_t number_ = 0;
};

}  // namespace tessera::internal
