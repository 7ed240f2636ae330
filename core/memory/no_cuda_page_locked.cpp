// Replaces cuda_page_locked.cpp in builds without TESSERA_CUDA.
#include "core/memory/cuda_page_locked.h"

namespace tessera::internal {

PageLockedAllocator* cuda_page_locked_allocator() { return nullptr; }

}  // namespace tessera::internal
