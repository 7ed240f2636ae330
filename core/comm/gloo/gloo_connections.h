#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/comm/backends.h"

namespace tessera::internal {

// [Note: one way] Each pair of ranks has two connections, and data flows in one direction on each. The other direction
// carries only gloo's announcements, which must precede data. On one shared connection, announcements would queue
// behind data, and a rank that is out of step could receive only after it has sent everything. Also, gloo's I/O thread
// would spin on incoming data while send() writes under the connection's lock.
constexpr int kConnectionsOfPair = 2;

// Returns the number of a message's connection, 0 or 1. This number is the last bit of the message's tag.
inline int connection_bit(int rank, int peer, bool is_send) { return is_send == (rank < peer) ? 1 : 0; }

// Makes c10d's gloo group with `connections` connections between each pair of ranks, all served by one thread.
// Collective. The group's send() and recv() must be called under a SigpipeBlock, because they write to sockets.
c10::intrusive_ptr<c10d::Backend> connect_by_tcp(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 const GlooOptions& options, int connections);

}  // namespace tessera::internal
