#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// An operation, as a backend receives it. Tensors are flat, and counts have one entry for each rank. Fields that a kind
// does not use are undefined or empty.
struct Collective {
  enum Kind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kReduce, kScatter, kBackendAllReduce, kAllToAll };
  Kind kind;
  at::Tensor full;   // the only tensor of operations without shards; undefined on ranks that pass none to scatter()
  at::Tensor shard;  // of kAllGather, kReduceScatter and kScatter
  std::string what;
  std::vector<int64_t> counts{};  // of the shards
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  int64_t numel = 0;                 // of the full tensor on any rank; 0 for kAllToAll
  std::vector<at::Tensor> pieces{};  // of kReduceScatter: if not empty, `full` is their concatenation, and undefined
  struct AllToAll {
    at::Tensor received, sent;
    std::vector<int64_t> receive_counts, send_counts;  // by rank
  };
  AllToAll all_to_all{};

  at::ScalarType dtype() const {
    return (all_to_all.sent.defined() ? all_to_all.sent : full.defined() ? full : shard).scalar_type();
  }
  std::string description() const;  // "all-gather of unit 'blocks.3'"
};

}  // namespace tessera::internal
