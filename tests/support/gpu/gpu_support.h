// The parts of Tessera that need CUDA. Accelerator tests are built without them, and load them from a library.
#pragma once

#include <memory>

#include "core/comm/nccl/nccl_communicator.h"
#include "core/memory/page_locked.h"
#include "core/runtime/graph_recorder.h"

namespace tessera::accelerator {
using namespace internal;

struct GpuSupport {
  std::shared_ptr<NcclBackends> groups;  // factory of NCCL groups
  PageLockedAllocator* page_locked;      // CUDA's allocator
  void (*delay_next_stream)(int64_t cycles);
  GraphRecorderFactory graph_recorder;  // makes recorders of CUDA graphs
};

}  // namespace tessera::accelerator

// Exported by the library that TESSERA_TEST_GPU names.
extern "C" __attribute__((visibility("default"))) void tessera_gpu_support(tessera::accelerator::GpuSupport* support);
