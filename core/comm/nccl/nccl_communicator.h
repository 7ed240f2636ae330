#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/backends.h"

namespace tessera::internal {

// Makes the c10d backends of NcclCommunicators: NCCL's own (nccl_backend.cpp), the program's, or substitutes in tests.
// A group and those split from it share one object. InitOptions::registered_memory needs a backend's allocateTensor().
class NcclBackends {
 public:
  virtual ~NcclBackends() = default;
  // Makes the backend of a group. Collective over the ranks that share `store`, which the backend keeps. Must connect
  // at once, with streams of high priority. The timeout of the backend's own watchdog, if any, must exceed `timeout`.
  virtual c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 at::Device device, std::chrono::milliseconds timeout) = 0;
  // Makes a group of the given ranks of `parent`, in this order. Collective over `parent`. A rank that joins no part
  // passes an empty `ranks`, and receives null.
  virtual c10::intrusive_ptr<c10d::Backend> split(c10d::Backend& parent, const c10::intrusive_ptr<c10d::Store>& store,
                                                  const std::vector<int>& ranks, std::chrono::milliseconds timeout) = 0;
  // Returns a Work of the same operation that owns none of its tensors. NCCL's own Work owns the operation's results
  // while it exists, also after wait(), so a list of unfinished operations would keep their memory.
  virtual c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work) = 0;
};

// Like make_nccl_communicator() in backends.h, but over `backends`.
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<NcclBackends> backends,
                                                     c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options);

// Returns NCCL's backends; null in a build without TESSERA_CUDA.
std::shared_ptr<NcclBackends> nccl_backends();
// Replaces NCCL in make_nccl_communicator() of backends.h, for tests. Null restores NCCL.
void set_nccl_backends(std::shared_ptr<NcclBackends> backends);

}  // namespace tessera::internal
