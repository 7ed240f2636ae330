#include "core/comm/gloo/gloo_transports.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "core/comm/descriptors.h"
#include "core/comm/gloo/gloo_connections.h"
#include "core/comm/gloo/memory_transport.h"
#include "core/comm/gloo/rounds_transport.h"
#include "core/comm/guest/transport_source.h"

namespace tessera::internal {

GlooTransports GlooTransports::connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       const GlooOptions& options) {
  GlooTransports made;
  if (options.carrier) {
    made.all_.push_back(options.carrier->make());
    made.assign_peers(rank, size);
    return made;
  }
  const std::shared_ptr<PeerMemory> memory =
      PeerMemory::connect(*store, rank, size, options.timeout, options.peer_memory, options.permits_tracing);
  const bool is_one_host = memory && memory->reaches_all();
  if (memory) made.all_.push_back(std::make_unique<MemoryTransport>(memory, size));
  if (is_one_host) made.all_.push_back(std::make_unique<RoundsTransport>(memory));
  c10::intrusive_ptr<c10d::Backend> connections;
  if (!is_one_host) {  // on one host, no message would use the sockets and their thread
    require_descriptors(tcp_descriptors(size), c10::str("rank ", rank, "'s connections to ", size - 1, " others"),
                        options.raises_descriptor_limit);
    connections = connect_by_tcp(store, rank, size, options, kConnectionsOfPair);
  }
  auto tcp = std::make_unique<TcpTransport>(std::move(connections), rank, size);
  made.tcp_ = tcp.get();
  made.all_.push_back(std::move(tcp));
  made.assign_peers(rank, size);
  // This barrier keeps a rank without operations from leaving while others are still connecting. It uses the store, not
  // c10d's collectives, because ranks that are threads of one process would race in c10d's flight recorder.
  if (store->add("tessera/connected", 1) == size) store->set("tessera/all_connected", std::vector<uint8_t>{1});
  store->wait({"tessera/all_connected"}, options.timeout);
  return made;
}

void GlooTransports::assign_peers(int rank, int size) {
  for (int peer = 0; peer < size; ++peer) {
    const auto first = std::ranges::find_if(all_, [&](const auto& transport) { return transport->reaches(peer); });
    by_peer_.push_back(peer == rank ? nullptr : first->get());
  }
  for (const auto& transport : all_) {
    const bool has_peers = std::ranges::find(by_peer_, transport.get()) != by_peer_.end();
    if (has_peers && transport->max_eager_numel() == 0) are_eager_ = false;
    // Ignores TCP without peers: no message uses it, and only a kBackendAllReduce connects it.
    if (has_peers || transport.get() != tcp_)
      max_eager_numel_ = std::max(max_eager_numel_, transport->max_eager_numel());
  }
}

Transport* GlooTransports::carrier_of(const Collective& collective) const {
  const auto carrier =
      std::ranges::find_if(all_, [&](const auto& transport) { return transport->carries(collective); });
  return carrier == all_.end() ? nullptr : carrier->get();
}

int GlooTransports::ended_rank() const {
  for (const auto& transport : all_)
    if (const int rank = transport->ended_rank(); rank >= 0) return rank;
  return -1;
}

bool GlooTransports::withdraw() noexcept {
  bool are_withdrawn = true;
  for (const auto& transport : all_) are_withdrawn &= transport->withdraw();
  return are_withdrawn;
}

void GlooTransports::disconnect() noexcept {
  for (const auto& transport : all_) transport->disconnect();
}

}  // namespace tessera::internal
