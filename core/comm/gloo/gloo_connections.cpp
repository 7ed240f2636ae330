// The library's only file that includes ProcessGroupGloo.hpp, and thus gloo's headers.
#include "core/comm/gloo/gloo_connections.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <utility>

#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {

c10::intrusive_ptr<c10d::Backend> connect_by_tcp(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 const GlooOptions& options, int connections) {
  const SigpipeBlock no_sigpipe;  // blocks SIGPIPE in this thread, and in gloo's threads, which inherit the mask
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->timeout = options.timeout;
  gloo->threads = 1;  // the pool is rarely used, because gloo's I/O thread runs sends and receives
  gloo->devices.assign(connections, c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo));
}

int64_t tcp_descriptors(int size) {
  constexpr int64_t kOfDevice = 4;  // per device: a listening socket, and the event descriptors of a thread
  return kConnectionsOfPair * (size - 1 + kOfDevice);
}

}  // namespace tessera::internal
