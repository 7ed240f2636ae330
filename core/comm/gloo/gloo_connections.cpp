// The only file that includes ProcessGroupGloo.hpp, and thus gloo's headers.
#include "core/comm/gloo/gloo_connections.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>

#include <utility>

namespace tessera::internal {

c10::intrusive_ptr<c10d::Backend> connect_by_tcp(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 const GlooOptions& options, int connections) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->timeout = options.timeout;
  gloo->threads = 1;  // its pool is rarely used: gloo's I/O thread runs sends and receives
  gloo->devices.assign(connections, c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo));
}

void ignore_broken_pipes() {
  struct sigaction current = {};
  // the program has set its own action
  if (sigaction(SIGPIPE, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;
  current.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &current, nullptr);
}

int64_t tcp_descriptors(int size) {
  constexpr int64_t kOfDevice = 4;  // a listening socket and its thread's event descriptors
  return kConnectionsOfPair * (size - 1 + kOfDevice);
}

}  // namespace tessera::internal
