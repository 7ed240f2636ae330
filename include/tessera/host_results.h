#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include <tessera/communicator.h>

namespace tessera {

// Collectives whose results the host needs at once, in its memory. Errors as of Communicator.

// op over ranks of `own`, of the same shape on all ranks and on any device; `own` is left unspecified.
at::Tensor reduce_to_host(Communicator& comm, const at::Tensor& own, ReduceOp op, std::string_view what);

// Every rank's `own`, of the same shape on all ranks and on any device, in rank order: [size(), ...].
at::Tensor gather_to_host(Communicator& comm, const at::Tensor& own, std::string_view what);

}  // namespace tessera
