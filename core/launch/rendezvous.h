#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>

#include "core/launch/launch_environment.h"
#include "core/trace/trace.h"

namespace tessera::internal {

// The result of a rendezvous.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks, and used by this group alone
  std::string address;                    // address at which the other ranks reach this rank
  std::optional<Trace::Run> traced_run;   // null if this rank is not traced
};

// Serves the store (rank 0, unless torchrun's agent does) or connects to it, and blocks until all ranks have joined.
// `address` is this rank's address for the others. If `address` is empty, uses loopback if all ranks are on one host,
// otherwise the address that faces the other hosts. Traced ranks then compare their hosts' clocks (clock_exchange.h).
//
// Collective, for a world of more than one. Throws CommError with this rank, the address and the port, and the ranks
// that are missing, joined twice, or have another world size.
Rendezvous rendezvous(const LaunchEnvironment& environment, const std::string& address,
                      std::chrono::milliseconds timeout);

// Reports that a rank has ended while others continue. Called with the ranks' token by the process that started them
// and serves their store (spawn_local). Ranks that wait for the ended rank in rendezvous() fail. Throws c10::Error.
void tell_of_end(const c10::intrusive_ptr<c10d::Store>& store, const std::string& token, int rank);

}  // namespace tessera::internal
