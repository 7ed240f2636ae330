#pragma once

#include <cstdint>

namespace tessera::internal {

// Memory that one rank announces to another rank of the same process, where ranks are threads. Other processes can
// write to the shared board, so the board holds a number, not the address. The other rank passes the number to find(),
// which checks that the memory is published and may be read or written. (Memory of another process is accessed through
// the kernel, by process_vm_readv, which checks addresses.)
//
// The memory is published until this object is destroyed. Movable. Different threads may use different objects.
class PublishedMemory {
 public:
  PublishedMemory() = default;                                   // publishes nothing
  PublishedMemory(void* data, uint64_t bytes, bool is_written);  // for writing by the other rank, or else for reading
  PublishedMemory(PublishedMemory&& other) noexcept;
  PublishedMemory& operator=(PublishedMemory&& other) noexcept;
  ~PublishedMemory();

  uint64_t number() const { return number_; }  // unique in this process; 0 if nothing is published

  // Returns the address. Throws std::runtime_error unless memory of exactly `bytes` bytes is published under
  // `number`, for writing if `to_write` is true, otherwise for reading.
  static void* find(uint64_t number, uint64_t bytes, bool to_write);

 private:
  uint64_t number_ = 0;
};

}  // namespace tessera::internal
