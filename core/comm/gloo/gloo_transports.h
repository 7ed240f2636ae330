#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/backends.h"
#include "core/comm/gloo/tcp_transport.h"
#include "core/comm/gloo/transport.h"

namespace tessera::internal {

// The transports of one rank of a gloo group, created by connect(). A new kind of transport must be created there.
class GlooTransports {
 public:
  // For a world of one rank, which needs no transports.
  GlooTransports() = default;
  // Connects to the other ranks, which meet in `store`. Collective. Throws exceptions derived from std::exception.
  static GlooTransports connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                const GlooOptions& options);

  // Returns the transport of messages to and from `peer`, which must be another rank.
  Transport& to(int peer) const { return *by_peer_[peer]; }
  // Returns the transport that carries the whole collective; null if the collective is exchanged as messages.
  Transport* carrier_of(const Collective& collective) const;

  // Whether all messages move data before they are awaited.
  bool are_eager() const { return are_eager_; }
  // Whether operations on full tensors of this size move no data until they are awaited.
  bool are_lazy(int64_t full_numel) const { return !by_peer_.empty() && full_numel > max_eager_numel_; }

  // Each of these functions calls the Transport function of the same name on the transports, and combines the results.
  int ended_rank() const;
  bool withdraw() noexcept;
  void disconnect() noexcept;

  // Returns null in a world of one or with GlooOptions::carrier. Not connected at first if all ranks share memory.
  TcpTransport* tcp() const { return tcp_; }

 private:
  void assign_peers(int rank, int size);

  std::vector<std::unique_ptr<Transport>> all_;  // a message uses the first transport that reaches its peer
  TcpTransport* tcp_ = nullptr;
  std::vector<Transport*> by_peer_;  // indexed by rank; null for this rank
  bool are_eager_ = true;
  int64_t max_eager_numel_ = 0;
};

}  // namespace tessera::internal
