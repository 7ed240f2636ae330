#include "tests/support/gpu/gpu_support.h"

#include "core/memory/cuda_page_locked.h"

void tessera_gpu_support(tessera::accelerator::GpuSupport* support) {
  *support = {tessera::internal::nccl_backends(), tessera::internal::cuda_page_locked_allocator()};
}
