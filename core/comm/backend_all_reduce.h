#pragma once

#include <string_view>

#include <tessera/communicator.h>

namespace tessera::internal {

// Sums `tensor` over the ranks with the backend's own all-reduce (ProcessGroupGloo's ring, or NCCL's), in an
// unspecified order. Apart from the order, behaves as Communicator::all_reduce() does. Traffic counts the bytes that a
// ring sends. On CPUs, first blocks until all ranks have called this function, and compares the sizes of their tensors.
Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what = {});

}  // namespace tessera::internal
