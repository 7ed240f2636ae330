#include "core/trace/ranges.h"

#include <c10/util/env.h>

#include "core/runtime/warn.h"

namespace tessera::internal {

RangeSink* RangeSink::from_environment() noexcept {
  if (c10::utils::check_env("TESSERA_NVTX") != true) return nullptr;
  RangeSink* const sink = nvtx_ranges();
  if (sink == nullptr) warn("TESSERA_NVTX=1 has no effect: this build has no NVTX; configure with -DTESSERA_CUDA=ON");
  return sink;
}

}  // namespace tessera::internal
