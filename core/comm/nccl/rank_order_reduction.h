#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <optional>

#include <tessera/communicator.h>
#include "core/comm/collective.h"
#include "core/comm/nccl/nccl_communicator.h"

namespace tessera::internal {

// Reductions of a device group that add in rank order, for InitOptions::rank_order_sums. Ranks exchange shards of the
// tensor by an all-to-all, in the tensor's dtype. Each rank adds the values of its shard on a stream of this object. In
// an all-reduce, a second all-to-all then sends each shard's sum to all ranks. So each rank sends as many bytes as in a
// ring, and the results are bit-equal to gloo's.
//
// The first all-to-all proceeds in pieces, so that its memory is at most kStagingBytes, whatever the size of the
// tensor. Must be used by one thread at a time.
class RankOrderReduction {
 public:
  static constexpr int64_t kStagingBytes = 32 << 20;

  // `backends` must outlive this object.
  RankOrderReduction(c10::intrusive_ptr<c10d::Backend> group, NcclBackends& backends, at::Device device)
      : group_(std::move(group)), backends_(backends), device_(device) {}

  // Whether the result of the collective depends on the order of additions: true for a sum or an average of a floating
  // type. Always false for kBackendAllReduce.
  static bool applies_to(const Collective& collective);

  // Starts the collective. Preconditions: applies_to() is true, all fields of `collective` are set, and the current
  // stream is ordered after the writes to its tensors. Work::wait() orders the current stream after the results.
  c10::intrusive_ptr<c10d::Work> start(const Collective& collective);

 private:
  const c10::intrusive_ptr<c10d::Backend> group_;
  NcclBackends& backends_;
  const at::Device device_;
  std::optional<c10::Stream> stream_;  // runs the additions; taken from libtorch's pool by the first start()
};

}  // namespace tessera::internal
