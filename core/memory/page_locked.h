#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace tessera::internal {

// Page-locked host memory as a device's driver gives it out: whole pages, as many as are needed. (libtorch's own
// allocator of such memory rounds up to a power of two, and keeps what was freed.)
class PageLockedAllocator {
 public:
  virtual ~PageLockedAllocator() = default;
  // Throws std::runtime_error if there is no more.
  virtual void* allocate(size_t bytes) = 0;
  // No device uses it any more.
  virtual void free(void* memory) noexcept = 0;
};

// CUDA's in builds with TESSERA_CUDA, or what the process has set instead. Null: there is none.
PageLockedAllocator* page_locked_allocator();
// For the whole process and for good; before the first page_locked().
void set_page_locked_allocator(PageLockedAllocator* allocator);

// What page_locked(bytes) takes of the machine: whole pages, of libtorch's allocator a power of two.
int64_t bytes_when_page_locked(int64_t bytes);

// Uninitialised bytes that devices copy from and to by themselves, of page_locked_allocator(), or of libtorch's where
// there is none. They go with the last reference, when no device may be using them: see CopyEngine. Any thread.
at::Tensor page_locked(int64_t bytes);

}  // namespace tessera::internal
