#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/comm/backends.h"

namespace tessera::internal {

// [Note: one way]
// Two connections join each pair of ranks, and data goes one way on each: on one from the lower rank, on the other to
// it. What comes the other way is small: announcements, without which gloo sends nothing. On one connection they would
// queue behind the data, so that of two ranks that are not in step one would begin to receive when it has sent
// everything; and while send() writes, holding the connection's lock, gloo's I/O thread would spin on what comes in.
constexpr int kConnectionsOfPair = 2;

// Which of them takes a message, as the last bit of its tag.
inline int connection_bit(int rank, int peer, bool is_send) { return is_send == (rank < peer) ? 1 : 0; }

// c10d's group over gloo with so many connections of each pair of ranks, all served by one thread. Its send() and
// recv() write to sockets and must be called under a SigpipeBlock. Collective.
c10::intrusive_ptr<c10d::Backend> connect_by_tcp(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 const GlooOptions& options, int connections);

}  // namespace tessera::internal
