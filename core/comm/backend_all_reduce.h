#pragma once

#include <string_view>

#include <tessera/communicator.h>

namespace tessera::internal {

// tensor <- sum over ranks of tensor, by the algorithm of the backend (ProcessGroupGloo's ring, or NCCL's), in an
// unspecified order. A reference for Communicator::all_reduce(), whose contract it has otherwise. Traffic counts the
// bytes that a ring sends.
Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what = {});

}  // namespace tessera::internal
