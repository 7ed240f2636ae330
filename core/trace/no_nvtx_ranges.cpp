// Replaces nvtx_ranges.cpp in builds without TESSERA_CUDA.
#include "core/trace/ranges.h"

namespace tessera::internal {

RangeSink* nvtx_ranges() { return nullptr; }

}  // namespace tessera::internal
