#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include <tessera/communicator.h>

namespace tessera {

// Collectives whose results the host needs at once. They return tensors in host memory, and throw as Communicator does.

// Returns op over ranks of `own`, which must have one shape on all ranks, and may be on any device. Leaves `own`
// unspecified.
at::Tensor reduce_to_host(Communicator& comm, const at::Tensor& own, ReduceOp op, std::string_view what);

// Returns the `own` of all ranks in rank order: [size(), ...]. `own` must have one shape on all ranks, and may be on
// any device.
at::Tensor gather_to_host(Communicator& comm, const at::Tensor& own, std::string_view what);

}  // namespace tessera
