// Replaces the CUDA files of this library in builds without TESSERA_CUDA.
#include <c10/util/env.h>

#include "core/memory/page_locked.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/warn.h"
#include "core/trace/ranges.h"

namespace tessera::internal {

PageLockedAllocator* cuda_page_locked_allocator() { return nullptr; }

std::unique_ptr<GraphRecorder> make_cuda_graph_recorder() { return nullptr; }

RangeSink* RangeSink::from_environment() noexcept {
  if (c10::utils::check_env("TESSERA_NVTX") == true)
    warn("TESSERA_NVTX=1 has no effect: this build has no NVTX; configure with -DTESSERA_CUDA=ON");
  return nullptr;
}

}  // namespace tessera::internal
