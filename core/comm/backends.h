#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

class TransportSource;

// permits_tracing, raises_descriptor_limit and process_setup are for init() and run_ranks(). Without them a group
// changes nothing process-wide.
struct GlooOptions {
  std::string address;  // of this rank's network interface, or its host name
  std::chrono::milliseconds timeout;
  bool peer_memory = true;               // see InitOptions::peer_memory
  bool serves_store = false;             // the store is in this process, which must outlive its readers: see Watchdog
  bool permits_tracing = false;          // ProcessSetup::permit_tracing
  bool raises_descriptor_limit = false;  // ProcessSetup::raise_descriptor_limit
  std::shared_ptr<const void> process_setup;  // held by the group and those split from it
  // The transport of all bytes; null: peer memory and TCP.
  std::shared_ptr<TransportSource> carrier = nullptr;
};

// Joins ranks into a group over c10d's gloo backend (TCP, CPU tensors) and, within a host, over peer memory.
// Collective. The ranks meet in `store`, which the group uses until it is destroyed. All ranks must pass the same
// store, and no other group may use it: wrap it in a PrefixStore. Throws CommError if the ranks do not meet in time.
std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options);

// The number of descriptors, mostly sockets, that a rank of such a group opens if peer memory does not reach all ranks.
int64_t tcp_descriptors(int size);

struct NcclOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool registered_memory = false;  // see InitOptions
  bool rank_order_sums = false;    // see InitOptions
  // The interval of heartbeats. A rank that misses ten of them counts as dead, and ends the waits of the others.
  std::chrono::milliseconds beat_every = std::chrono::seconds(1);
  bool serves_store = false;                            // as above
  std::shared_ptr<const void> process_setup = nullptr;  // as above
  bool is_borrowed = false;                             // the c10d group is the program's, which shuts it down
};

// Joins ranks into a group over NCCL, for tensors on `device`. Otherwise as make_gloo_communicator(). Throws
// std::invalid_argument in a build without TESSERA_CUDA.
std::shared_ptr<Communicator> make_nccl_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options);

}  // namespace tessera::internal
