#pragma once

#include <string_view>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Collectives that only this library starts.

// Sums `tensor` over the ranks with the backend's own all-reduce (ProcessGroupGloo's ring, or NCCL's). Its order and
// rounding are unspecified. Otherwise behaves as Communicator::all_reduce() does. Traffic counts the bytes that a ring
// sends. On CPUs, first blocks until all ranks have called this function, and throws CommError if tensor sizes differ.
Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what = {});

// Runs Communicator::reduce_scatter() on the concatenation of `pieces`, which must have one dtype. All ranks must pass
// equally many pieces, and each piece must have the same size on all ranks. Pieces must not be changed before wait()
// returns. A lone piece may be overwritten. If exchanges_pieces() is false, first concatenates several pieces.
Pending reduce_scatter_pieces(Communicator& comm, at::Tensor shard, std::vector<at::Tensor> pieces,
                              ReduceOp op = ReduceOp::kSum, std::string_view what = {});

// Returns whether the group accepts pieces that are not concatenated. False for NCCL, which reduces one tensor at a
// time, and for a world of one. True on CPUs, also over a process group of the program.
bool exchanges_pieces(const Communicator& comm);

}  // namespace tessera::internal
