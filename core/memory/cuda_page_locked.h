#pragma once

#include "core/memory/page_locked.h"

namespace tessera::internal {

// Of the CUDA runtime, never destroyed; null in a build without TESSERA_CUDA.
PageLockedAllocator* cuda_page_locked_allocator();

}  // namespace tessera::internal
