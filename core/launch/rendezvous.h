#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>

#include "core/launch/launch_environment.h"
#include "core/trace/trace.h"

namespace tessera::internal {

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks, and used by this group alone
  std::string address;                    // address at which the other ranks reach this rank
  std::optional<Trace::Run> traced_run;   // null if this rank is not traced
};

// Serves the store (on rank 0, unless torchrun's agent or spawn_local does) or connects to it. Blocks until all ranks
// have joined. `address` is this rank's address for the others. If empty, uses loopback if all ranks are on one host,
// otherwise the address that faces the other hosts. Traced ranks then compare their hosts' clocks (clock_exchange.h).
//
// Collective. The world must have more than one rank. Throws CommError, which names this rank, the address, the port,
// and the ranks that are missing, joined twice, or have another world size.
Rendezvous rendezvous(const LaunchEnvironment& environment, const std::string& address,
                      std::chrono::milliseconds timeout);

// Reports that `rank` has ended while others continue, so that ranks that wait for it in rendezvous() throw. A no-op
// once all ranks have joined. Called by the process that started the ranks and serves their store (spawn_local), with
// their `token`. Throws c10::Error if the store does not answer.
void tell_of_end(const c10::intrusive_ptr<c10d::Store>& store, const std::string& token, int rank);

}  // namespace tessera::internal
