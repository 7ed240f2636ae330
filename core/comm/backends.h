#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

// The last three are for init() and run_ranks(): without them a group changes nothing process-wide.
struct GlooOptions {
  std::string address;  // or host name, of this rank's own network interface
  std::chrono::milliseconds timeout;
  bool peer_memory = true;    // InitOptions::peer_memory
  bool serves_store = false;  // the store is in this process, and goes with it: it then waits for readers (StallWatch)
  bool permits_tracing = false;               // ProcessSetup::permit_tracing
  bool raises_descriptor_limit = false;       // ProcessSetup::raise_descriptor_limit
  std::shared_ptr<const void> process_setup;  // held by the group and those split from it
};

// Joins ranks into a group over c10d's gloo backend (TCP, CPU tensors) and, within a host, each other's
// memory. `store` is where the ranks find each other: the same one on all ranks, used by this group
// alone (wrap it in a PrefixStore otherwise), shared by the group for its lifetime. Collective; throws
// CommError if the ranks do not meet in time.
std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options);

// How many descriptors a rank of such a group takes where memory does not reach: sockets, above all.
int64_t tcp_descriptors(int size);

struct NcclOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool registered_memory = false;  // see InitOptions
  // How often a rank tells that it lives; one that has not for ten times as long ends the waits of others.
  std::chrono::milliseconds beat_every = std::chrono::seconds(1);
  bool serves_store = false;                            // as above
  std::shared_ptr<const void> process_setup = nullptr;  // as above
};

// The same over NCCL, for tensors on `device`. In a build without TESSERA_CUDA it throws std::invalid_argument.
std::shared_ptr<Communicator> make_nccl_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options);

}  // namespace tessera::internal
