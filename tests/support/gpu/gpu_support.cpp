#include "tests/support/gpu/gpu_support.h"

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>

#include <atomic>

#include "core/memory/page_locked.h"

namespace {

void delay_next_stream(int64_t cycles) {
  static std::atomic<int> turn = 0;
  const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromPool(/*isHighPriority=*/turn++ % 2 == 0));
  at::cuda::sleep(cycles);
}

}  // namespace

void tessera_gpu_support(tessera::accelerator::GpuSupport* support) {
  *support = {tessera::internal::nccl_backends(), tessera::internal::cuda_page_locked_allocator(), &delay_next_stream,
              &tessera::internal::make_cuda_graph_recorder};
}
