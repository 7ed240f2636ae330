#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// One operation of a group, as a backend is given it: tensors flat, counts always one for each rank.
struct Collective {
  enum Kind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kReduce, kScatter, kBackendAllReduce, kAllToAll };
  Kind kind;
  at::Tensor full;   // the only tensor of operations without shards; undefined where scatter() takes no `full`
  at::Tensor shard;  // undefined in operations without shards. Of kAllToAll: what is sent, and `full` what is received
  std::string what;
  std::vector<int64_t> counts{};
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::vector<int64_t> send_counts{};  // of kAllToAll, whose `counts` are those of what is received
  int64_t numel = 0;                   // of `full`, wherever that is
  std::vector<at::Tensor> pieces{};    // of kReduceScatter, in place of `full`: what lies one after the other there

  std::string description() const;  // "all-gather of unit 'blocks.3'"
};

}  // namespace tessera::internal
