#pragma once

#include <string_view>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Runs Communicator::reduce_scatter() on a full tensor that is the concatenation of `pieces`. All pieces must have one
// dtype. All ranks must pass equally many pieces, and each piece must have the same size on all ranks. The pieces are
// read until wait() returns, and never written. If exchanges_pieces() is false, concatenates them first.
Pending reduce_scatter_pieces(Communicator& comm, at::Tensor shard, std::vector<at::Tensor> pieces,
                              ReduceOp op = ReduceOp::kSum, std::string_view what = {});

// Whether the group sends pieces without concatenating them. False for NCCL, which reduces one tensor at a time, and
// for a world of one, which sends nothing.
bool exchanges_pieces(const Communicator& comm);

}  // namespace tessera::internal
