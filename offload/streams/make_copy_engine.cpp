#include <memory>

#include "core/runtime/copy_engine.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"
#include "offload/streams/simulated_link.h"

namespace tessera::internal {

std::unique_ptr<CopyEngine> CopyEngine::make(at::Device device) {
  const SimulatedLink* link = SimulatedLinkScope::current();
  if (device.is_cpu()) return make_thread_copy_engine(link != nullptr ? *link : SimulatedLink());
  require(link == nullptr, "a SimulatedLink on ", device.str(), ": only a CPU's link is simulated");
  return make_stream_copy_engine(with_index(device));
}

}  // namespace tessera::internal
