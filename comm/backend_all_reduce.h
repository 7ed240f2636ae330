#pragma once

#include <string>
#include <string_view>

#include "tessera/comm/communicator.h"

namespace tessera {

// tensor <- sum over ranks of tensor, by the backend's own algorithm, whatever order it adds in:
// ProcessGroupGloo's ring, NCCL's. For comparison with Communicator::all_reduce(), whose contract
// is the same in all other respects. Traffic counts what a ring would send.
Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what = {});

// What a backend implements for it. World sizes above 1 only.
class BackendCollectives {
 public:
  virtual ~BackendCollectives() = default;
  virtual Pending start_backend_all_reduce(at::Tensor tensor, std::string what) = 0;
};

}  // namespace tessera
