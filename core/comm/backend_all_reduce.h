#pragma once

#include <string_view>

#include <tessera/communicator.h>

namespace tessera::internal {

// tensor <- sum over ranks of tensor, by the backend's own algorithm, whatever order it adds in: ProcessGroupGloo's
// ring, NCCL's. For comparison with Communicator::all_reduce(), whose contract is the same in all other respects.
// Traffic counts what a ring would send.
Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what = {});

}  // namespace tessera::internal
