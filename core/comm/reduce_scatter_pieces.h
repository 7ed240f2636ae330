#pragma once

#include <string_view>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Communicator::reduce_scatter() of a full tensor that lies in several `pieces`, one after the other: as many, and of
// the same numbers of elements, on all ranks; of one dtype. They may belong to somebody else: they are read until
// wait(), and nothing is written to them. A group that does not exchange pieces makes one tensor of them first.
Pending reduce_scatter_pieces(Communicator& comm, at::Tensor shard, std::vector<at::Tensor> pieces,
                              ReduceOp op = ReduceOp::kSum, std::string_view what = {});

// Whether the group sends pieces from where they lie: not NCCL, which reduces one tensor at a time, and not a world of
// one, where nothing is sent.
bool exchanges_pieces(const Communicator& comm);

}  // namespace tessera::internal
