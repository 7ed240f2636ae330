#pragma once

#include <cstddef>
#include <cstdint>

#include "core/memory/counted_buffers.h"
#include "core/runtime/copy_engine.h"

namespace tessera::internal {

// The settings of GradientReducer that depend on the wrapper.
struct ReducerOptions {
  bool refuse_uneven_use = false;  // see FsdpOptions
  bool check_finite = false;
  bool backend_all_reduce = false;  // see DdpOptions
  bool is_static = false;           // every pass has gradients for the same parameters: only the first is exchanged
  size_t in_flight = 2;             // reductions in flight: one is sent while the next bucket fills
  size_t max_lazy_in_flight = 2;    // of reductions that progress only in wait(): ranks may be apart by as many
  // A gradient of at least this many bytes may be reduced from autograd's memory. To copy a smaller one into its bucket
  // costs less than one more message.
  int64_t zero_copy_bytes = int64_t{256} << 10;
  // Copies reduced gradients to the host. Null if they stay on the device.
  CopyEngine* to_host = nullptr;
  CountedBuffers* staging = nullptr;
};

}  // namespace tessera::internal
