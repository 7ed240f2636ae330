// The parts of Tessera for GPUs that accelerator tests are built without: see tests/support/accelerator.
#pragma once

#include <memory>

#include "core/comm/nccl/nccl_communicator.h"
#include "core/memory/page_locked.h"
#include "core/runtime/graph_recorder.h"

namespace tessera::accelerator {
using namespace internal;

struct GpuSupport {
  std::shared_ptr<NcclBackends> groups;  // NCCL's
  PageLockedAllocator* page_locked;      // CUDA's
  void (*delay_next_stream)(int64_t cycles);
  GraphRecorderFactory graph_recorder;  // of CUDA graphs
};

}  // namespace tessera::accelerator

// Exported by the library that TESSERA_TEST_GPU names.
extern "C" __attribute__((visibility("default"))) void tessera_gpu_support(tessera::accelerator::GpuSupport* support);
