#include "tests/support/gpu/gpu_support.h"

#include "core/memory/cuda_page_locked.h"

void tessera_gpu_support(tessera::accelerator::GpuSupport* support) {
  *support = {tessera::nccl_backends(), tessera::cuda_page_locked_allocator()};
}
