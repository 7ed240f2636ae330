#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string_view>

#include "tessera/comm/communicator.h"

namespace tessera {

// c10d's interface to the ranks of a communicator, for code of c10d's that wants one (its Reducer).
// Broadcasts and all-reduces (sum, average, min, max) of one tensor are the communicator's own:
// counted, in rank order on gloo, with its errors. Everything else throws. The process group
// shares the communicator; use both from one thread at a time. Not collective.
c10::intrusive_ptr<c10d::ProcessGroup> process_group_over(std::shared_ptr<Communicator> comm);

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
