#pragma once

#include <string_view>

#include <tessera/communicator.h>

namespace tessera::internal {

// Sums `tensor` over ranks by the algorithm of the backend (ProcessGroupGloo's ring, or NCCL's), in an unspecified
// order. Otherwise has the contract of Communicator::all_reduce(), for which it is a reference. Traffic counts the
// bytes that a ring sends. On CPUs first blocks until all ranks have called it, and compares their sizes.
Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what = {});

}  // namespace tessera::internal
