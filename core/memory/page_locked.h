#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace tessera::internal {

// Allocates page-locked host memory from a device's driver, in whole pages. (libtorch's own allocator rounds up to a
// power of two, and keeps freed memory.)
class PageLockedAllocator {
 public:
  virtual ~PageLockedAllocator() = default;
  // Throws std::runtime_error if no memory is available.
  virtual void* allocate(size_t bytes) = 0;
  // The memory must not be in use by a device.
  virtual void free(void* memory) noexcept = 0;
};

// Returns the CUDA runtime's allocator, which is never destroyed; null in a build without TESSERA_CUDA.
PageLockedAllocator* cuda_page_locked_allocator();

// Returns the allocator that the process has set, or else CUDA's in builds with TESSERA_CUDA, or else null.
PageLockedAllocator* page_locked_allocator();
// Sets the allocator of the process. Must be called before the first page_locked().
void set_page_locked_allocator(PageLockedAllocator* allocator);

// Returns the bytes that page_locked(bytes) allocates: whole pages, or with libtorch's allocator a power of two.
int64_t bytes_when_page_locked(int64_t bytes);

// Allocates uninitialised page-locked bytes, from page_locked_allocator() or else libtorch's allocator. Destroying the
// last reference frees the memory; no device may still use it then (see CopyEngine). Thread-safe.
at::Tensor page_locked(int64_t bytes);

}  // namespace tessera::internal
