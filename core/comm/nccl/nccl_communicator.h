#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/backends.h"

namespace tessera::internal {

// Makes what an NcclCommunicator's groups run on: NCCL's own backends (core/comm/nccl/nccl_backend.cpp), or ones that
// behave like those, in tests. Shared by a group and its parts. Registered memory is what they allocateTensor().
class NcclBackends {
 public:
  virtual ~NcclBackends() = default;
  // Collective over the ranks that share `store`, which the backend keeps. Connected at once, on a stream of high
  // priority. A backend's own watch over its operations, if it has one, waits longer than `timeout`.
  virtual c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 at::Device device, std::chrono::milliseconds timeout) = 0;
  // A group of these ranks of `parent`, in this order. Collective over `parent`, with other ranks for the ranks that
  // are not in it; null where this one is in none.
  virtual c10::intrusive_ptr<c10d::Backend> split(c10d::Backend& parent, const c10::intrusive_ptr<c10d::Store>& store,
                                                  const std::vector<int>& ranks, std::chrono::milliseconds timeout) = 0;
};

// Joins ranks into a group over these backends; see backends.h.
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<NcclBackends> backends,
                                                     c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options);

// NCCL's own; null in a build without TESSERA_CUDA.
std::shared_ptr<NcclBackends> nccl_backends();
// What make_nccl_communicator() of backends.h takes in place of NCCL, from now on: for tests, which have none. Null:
// NCCL again.
void set_nccl_backends(std::shared_ptr<NcclBackends> backends);

}  // namespace tessera::internal
