#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/comm/collective.h"
#include "core/comm/gloo/gloo_operation.h"

namespace tessera::internal {

// Whether an all-reduce uses reduce_by_doubling(): true for a maximum or minimum of few integers over many ranks.
bool spreads_by_doubling(const at::Tensor& tensor, ReduceOp reduce, int size);

// Implements the collectives of the gloo backend by messages between pairs of ranks. Copies of this object refer to the
// same operation.
class GlooCollectives {
 public:
  // `op` must outlive this object. For `are_eager`, see GlooTransports::are_eager().
  GlooCollectives(GlooOperation& op, int rank, int size, bool are_eager)
      : op_(op), rank_(rank), size_(size), are_eager_(are_eager) {}

  // Starts the first step of the collective. If more steps follow, starts a pipeline for them, or sets op.complete.
  void start(const Collective& collective) const;

 private:
  void reduce_scatter(const std::vector<at::Tensor>& pieces, const at::Tensor& shard,
                      const std::vector<int64_t>& counts, ReduceOp reduce) const;
  void all_reduce(const at::Tensor& tensor, ReduceOp reduce) const;
  void reduce_by_doubling(const at::Tensor& tensor, ReduceOp reduce) const;
  void reduce_to_root(const at::Tensor& tensor, ReduceOp reduce, int root) const;
  void broadcast(const at::Tensor& tensor, int root) const;

  template <class Send, class Receive>
  void exchange(Send send, Receive receive) const;
  void exchange_shards(const at::Tensor& full, const at::Tensor& shard, const std::vector<int64_t>& counts) const;
  using Segments = std::vector<std::vector<at::Tensor>>;
  Segments exchange_parts(const Segments& parts) const;
  void send_parts(const std::vector<at::Tensor>& parts, const at::Tensor& own, int root) const;
  bool reduces_in_background(const at::Tensor& tensor) const;

  GlooOperation& op_;
  const int rank_, size_;
  const bool are_eager_;
};

}  // namespace tessera::internal
