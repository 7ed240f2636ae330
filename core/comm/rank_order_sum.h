#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Reduces in one pass over memory: out[i] <- op(parts[0][i], parts[1][i], ...), in this order. The fixed order makes
// every stage of ZeRO agree bit for bit.
//
// All tensors must be contiguous, on the CPU, and of one dtype and numel; the dtype must be one that Communicator
// reduces by this op. `out` may be one of the parts. 16-bit floating types are reduced in fp32 and rounded once.
// kAverage divides the sum by the number of parts.
void reduce_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);
// Reduces raw memory: each address has `numel` elements of `dtype`, and must be aligned to the dtype.
void reduce_in_rank_order(void* out, const std::vector<const void*>& parts, int64_t numel, at::ScalarType dtype,
                          ReduceOp op);
// Does what reduce_in_rank_order() does, bit for bit, on the calling thread alone.
void reduce_in_rank_order_here(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

// Sets `out` to the bits of reduce_in_rank_order(), by libtorch's operators on any current stream. `op` must be a sum
// or an average. All tensors must be on one device, of one floating dtype and shape. `out` may be one of the parts.
void add_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

// Divides `numel` elements over `size` ranks, and returns counts by rank. The first `numel % size` ranks get one more.
std::vector<int64_t> even_counts(int64_t numel, int size);

}  // namespace tessera::internal
