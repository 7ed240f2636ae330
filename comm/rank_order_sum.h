#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

// out[i] <- op(parts[0][i], parts[1][i], ...), combined in this order, one pass over memory.
//
// All are contiguous CPU tensors of one numeric dtype and numel; `out` may be one of the parts.
// 16-bit floating types are combined in fp32 and rounded once; kAverage divides the sum by the
// number of parts (and is refused for integral types with std::invalid_argument).
// Rank-ordered reduction: what makes every stage of ZeRO agree bit for bit.
void reduce_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

}  // namespace tessera
