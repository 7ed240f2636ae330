#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// A collective operation as a backend receives it. Tensors are flat, and counts have one entry for each rank. Fields
// that a kind does not use are undefined or empty.
struct Collective {
  enum Kind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kReduce, kScatter, kBackendAllReduce, kAllToAll };
  Kind kind;
  at::Tensor full;   // the whole tensor; undefined in kAllToAll, in kScatter on non-root ranks, and if `pieces` is set
  at::Tensor shard;  // this rank's part; only for kAllGather, kReduceScatter and kScatter
  std::string what;
  std::vector<int64_t> counts{};  // number of elements of each rank's shard, by rank
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  int64_t numel = 0;                 // elements of the whole tensor, set on all ranks; 0 for kAllToAll
  std::vector<at::Tensor> pieces{};  // the full tensor's parts in kReduceScatter; if not empty, `full` is undefined
  struct AllToAll {
    at::Tensor received, sent;
    std::vector<int64_t> receive_counts, send_counts;  // numbers of elements, by rank
  };
  AllToAll all_to_all{};

  at::ScalarType dtype() const {
    return (all_to_all.sent.defined() ? all_to_all.sent : full.defined() ? full : shard).scalar_type();
  }
  std::string description() const;  // for example "all-gather of unit 'blocks.3'"
  std::string details() const;      // for example " (8 elements)", or " to rank 1 (8 elements of Long, maxima)"
};

}  // namespace tessera::internal
