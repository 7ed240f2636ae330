#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include <tessera/communicator.h>

namespace tessera {

// Collectives whose results the host needs at once. They block, return tensors in host memory, and throw like
// Communicator.

// Returns the reduction of all ranks' `own` by `op`. `own` must have the same shape on all ranks, and may be on any
// device. May overwrite `own` with unspecified values.
at::Tensor reduce_to_host(Communicator& comm, const at::Tensor& own, ReduceOp op, std::string_view what);

// Returns all ranks' `own`, stacked in rank order: [size(), ...]. `own` must have the same shape on all ranks, and may
// be on any device.
at::Tensor gather_to_host(Communicator& comm, const at::Tensor& own, std::string_view what);

// Checks that all ranks pass the same lines of text, such as a program's options. Collective. If the lines agree, runs
// one small all-reduce. If they differ, throws std::invalid_argument on every rank. The error names `subject`, the
// lowest rank whose lines differ from rank 0's, and the first line that differs.
void require_agreement(Communicator& comm, const std::string& subject, const std::vector<std::string>& lines);

// Returns the number of ranks that still have data, for loops over parts of unequal length (torch's Join). If a rank
// left the loop early, the collectives of other ranks would fail. Collective: all-reduces one number. To use all data,
// a rank without data continues with any batch and a loss of 0. Gradients, which are averages over all ranks, must then
// be rescaled:
//
//   while (int active = tessera::ranks_with_data(*comm, loader.has_next())) {
//     const bool own = loader.has_next();
//     auto loss = loss_of(fsdp(own ? batch = loader.next() : batch));
//     (loss * (own ? double(comm->size()) / active : 0.0)).backward();
//     ...
//   }
//
// To stop all ranks when one rank has no more data: while (ranks_with_data(*comm, has_next) == comm->size()).
int ranks_with_data(Communicator& comm, bool has_data);

}  // namespace tessera
