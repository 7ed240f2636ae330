#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Reduces in one pass over memory: out[i] <- op(parts[0][i], parts[1][i], ...), in this order. The order is fixed so
// that all ZeRO stages compute the same bits.
//
// All tensors must be contiguous, on the CPU, and of one dtype and numel; the dtype must be one that Communicator
// reduces by this op. `out` may be one of the parts. 16-bit floating types are reduced in fp32 and rounded once.
// kAverage divides the sum by the number of parts.
void reduce_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);
// Reduces raw memory: each address points to `numel` elements of `dtype`, and must be aligned for that dtype.
void reduce_in_rank_order(void* out, const std::vector<const void*>& parts, int64_t numel, at::ScalarType dtype,
                          ReduceOp op);
// Computes the same bits as reduce_in_rank_order(), but uses only the calling thread.
void reduce_in_rank_order_here(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

// Computes the same bits as reduce_in_rank_order() with libtorch operators, on the current stream. `op` must be a sum
// or an average. All tensors must be on one device, of one floating dtype and shape. `out` may be one of the parts.
void add_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

// Divides `numel` elements over `size` ranks. Returns counts by rank. The first `numel % size` counts are larger by 1.
std::vector<int64_t> even_counts(int64_t numel, int size);

}  // namespace tessera::internal
