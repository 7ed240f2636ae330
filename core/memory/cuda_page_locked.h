#pragma once

#include "core/memory/page_locked.h"

namespace tessera::internal {

// Returns the CUDA runtime's allocator, which is never destroyed; null in a build without TESSERA_CUDA.
PageLockedAllocator* cuda_page_locked_allocator();

}  // namespace tessera::internal
