#pragma once

#include <cstddef>

#include "core/memory/counted_buffers.h"
#include "core/runtime/copy_engine.h"

namespace tessera::internal {

// What a wrapper's policy asks of GradientReducer.
struct ReducerOptions {
  bool refuse_uneven_use = false;  // see FsdpOptions
  bool check_finite = false;
  bool backend_all_reduce = false;  // see DdpOptions
  bool is_static = false;           // every pass has gradients for the same parameters: nothing is exchanged at the end
  size_t in_flight = 2;             // reductions under way: one in transit while the next bucket fills up
  size_t max_lazy_in_flight = 2;    // of those that move only while they are awaited: ranks may be apart by as many
  // Reduced gradients leave the device: null if they stay.
  CopyEngine* to_host = nullptr;
  CountedBuffers* staging = nullptr;
};

}  // namespace tessera::internal
