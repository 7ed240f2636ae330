#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>

#include "core/launch/launch_environment.h"
#include "core/trace/trace.h"

namespace tessera::internal {

// Where the ranks of a launched group have found each other.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks, used by this group alone
  std::string address;                    // of this rank, such that the others can reach it
  std::optional<Trace::Run> traced_run;   // where this rank is traced
};

// Serves the store (rank 0, unless torchrun's agent does) or connects to it, and waits until every
// rank has come. `address` is where the others reach this rank; if empty, it is found out: loopback
// when all ranks are on one host, else the address that faces the other hosts. Ranks that are traced
// (some may be, and others not) then compare their hosts' clocks: clock_exchange.h.
//
// Collective, for a world of more than one. Throws CommError that names this rank, the address and
// the port, and the ranks that did not come, came twice, or are of another world size.
Rendezvous rendezvous(const LaunchEnvironment& environment, const std::string& address,
                      std::chrono::milliseconds timeout);

// For who serves the store of ranks that it has started itself (spawn_local), with their token: the rank has ended
// well. Those that wait in rendezvous() for one that has ended before all had come are told, where the agent serves the
// store. Throws what the store throws.
void tell_of_end(const c10::intrusive_ptr<c10d::Store>& store, const std::string& token, int rank);

}  // namespace tessera::internal
