#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// out[i] <- op(parts[0][i], parts[1][i], ...), combined in this order, one pass over memory.
//
// All are contiguous CPU tensors of one dtype that Communicator reduces by this op, and of one numel; `out` may be one
// of the parts. 16-bit floating types are combined in fp32 and rounded once; kAverage divides the sum by the number of
// parts. Rank-ordered reduction: what makes every stage of ZeRO agree bit for bit.
void reduce_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);
// The same of memory that no tensor has: `numel` elements of this dtype at each place, aligned to it.
void reduce_in_rank_order(void* out, const std::vector<const void*>& parts, int64_t numel, at::ScalarType dtype,
                          ReduceOp op);
// The same bits by the calling thread alone.
void reduce_in_rank_order_here(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

}  // namespace tessera::internal
