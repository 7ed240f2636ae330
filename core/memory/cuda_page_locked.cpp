// Compiled only with TESSERA_CUDA.
#include "core/memory/page_locked.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace tessera::internal {
namespace {

class CudaPageLocked final : public PageLockedAllocator {
 public:
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    // Portable memory can be used by all devices of the process, not only by the current one.
    const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    if (error == cudaSuccess) return memory;
    static_cast<void>(cudaGetLastError());  // clears the error, which the next kernel launch would report
    throw std::runtime_error("CUDA gave no " + std::to_string(bytes) +
                             " bytes of page-locked host memory: " + cudaGetErrorString(error));
  }
  void free(void* memory) noexcept override {
    // At process end the driver may already be unloaded; the memory is then already free.
    if (cudaFreeHost(memory) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
};

}  // namespace

PageLockedAllocator* cuda_page_locked_allocator() {
  static auto* const allocator = new CudaPageLocked;
  return allocator;
}

}  // namespace tessera::internal
