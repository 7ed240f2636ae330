#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

class TransportSource;

// The group changes process-wide settings only if permits_tracing, raises_descriptor_limit or process_setup is set.
// Only init() and run_ranks() set these three fields.
struct GlooOptions {
  std::string address;  // IP address of this rank's network interface, or this rank's host name
  std::chrono::milliseconds timeout;
  bool peer_memory = true;                    // see InitOptions::peer_memory
  bool serves_store = false;                  // this process serves the store: see Watchdog::await_readers()
  bool permits_tracing = false;               // see ProcessSetup::permit_tracing
  bool raises_descriptor_limit = false;       // see ProcessSetup::raise_descriptor_limit
  std::shared_ptr<const void> process_setup;  // keeps ProcessSetup's changes in effect; split groups share it
  // Makes the transport that carries all messages. If null, the group uses peer memory and TCP.
  std::shared_ptr<TransportSource> carrier = nullptr;
};

// Joins ranks into a group over c10d's gloo backend (TCP, CPU tensors) and, within a host, over peer memory.
// Collective. The ranks meet in `store`, which the group uses while it exists. All ranks must pass the same store,
// wrapped in a PrefixStore if the store has other users. Throws CommError if a rank does not join before the timeout.
std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options);

// Returns the number of descriptors, mostly sockets, that a gloo rank opens if peer memory does not reach all ranks.
int64_t tcp_descriptors(int size);

struct NcclOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool registered_memory = false;  // see InitOptions::registered_memory
  bool rank_order_sums = false;    // see InitOptions::rank_order_sums
  // Interval of heartbeats. If a rank misses ten heartbeats, it counts as dead, and the waits of the other ranks throw.
  std::chrono::milliseconds beat_every = std::chrono::seconds(1);
  bool serves_store = false;                            // see GlooOptions::serves_store
  std::shared_ptr<const void> process_setup = nullptr;  // see GlooOptions::process_setup
  bool is_borrowed = false;                             // the program owns the c10d group, and shuts it down
};

// Joins ranks into a group over NCCL, for tensors on `device`. Apart from that, the contract is that of
// make_gloo_communicator(). Throws std::invalid_argument in a build without TESSERA_CUDA.
std::shared_ptr<Communicator> make_nccl_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options);

}  // namespace tessera::internal
