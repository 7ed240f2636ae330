// Calls all collectives. Tests compare the results with those of another group.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "tests/support/reference.h"

namespace tessera::collectives {
using namespace internal;

inline constexpr at::ScalarType kReducedDtypes[] = {at::kFloat,    at::kDouble, at::kHalf,
                                                    at::kBFloat16, at::kInt,    at::kLong};

// The results of a rank's collectives, by name.
using Results = std::map<std::string, at::Tensor>;
inline at::Tensor values_of(const Communicator& comm, int64_t numel, at::ScalarType dtype) {
  return testing_support::seeded(31 + comm.rank(), [&] { return torch::randn({numel}) * 100; })
      .to(dtype)
      .to(comm.device());
}

// Runs every reduction, of even and uneven parts, out of place and in place.
inline Results reduce_all(Communicator& comm) {
  const int rank = comm.rank(), size = comm.size();
  Results results;
  for (const at::ScalarType dtype : kReducedDtypes)
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
      if (op == ReduceOp::kAverage && !at::isFloatingType(dtype)) continue;
      const std::string of = c10::str(dtype, " by ", static_cast<int>(op), ": ");
      for (const int64_t numel : {1, 2, 67}) {
        at::Tensor all = values_of(comm, numel, dtype), to_root = all.clone();
        comm.all_reduce(all, op, "x").wait();
        results[c10::str(of, "all-reduce of ", numel)] = comm.to_host(all, "x");
        comm.reduce(to_root, size - 1, op, "x").wait();
        results[c10::str(of, "reduce of ", numel)] = comm.to_host(to_root, "x");
      }
      std::vector<int64_t> even(size, 13), uneven;
      for (int other = 0; other < size; ++other) uneven.push_back(other == 1 ? 0 : 5 + 2 * other);
      for (const auto& counts : {even, uneven}) {
        int64_t total = 0, begin = 0;
        for (int other = 0; other < size; ++other) {
          if (other < rank) begin += counts[other];
          total += counts[other];
        }
        const at::Tensor full = values_of(comm, total, dtype), in_place = full.clone();
        at::Tensor shard = torch::zeros({counts[rank]}, full.options());
        comm.reduce_scatter(shard, full, op, counts, "x").wait();
        results[c10::str(of, "reduce-scatter of ", total)] = comm.to_host(shard, "x");
        shard = in_place.narrow(0, begin, counts[rank]);
        comm.reduce_scatter(shard, in_place, op, counts, "x").wait();
        results[c10::str(of, "reduce-scatter in place of ", total)] = comm.to_host(shard, "x");
      }
    }
  return results;
}

// Runs every collective that only moves data, in all dtypes.
inline Results move_all(Communicator& comm) {
  const int rank = comm.rank(), size = comm.size(), last = size - 1;
  std::vector<int64_t> uneven, sent, received;  // all-to-all: rank a sends a + 2b elements to rank b
  int64_t total = 0, total_sent = 0, total_received = 0;
  for (int other = 0; other < size; ++other) {
    uneven.push_back(other == 1 ? 0 : 5 + 2 * other);
    sent.push_back(rank + 2 * other);
    received.push_back(other + 2 * rank);
    total += uneven.back();
    total_sent += sent.back();
    total_received += received.back();
  }
  Results results;
  for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                                     at::kFloat, at::kDouble, at::kBool, at::kComplexFloat}) {
    const auto keep = [&](const char* name, const at::Tensor& result) {
      results[c10::str(dtype, ": ", name)] = comm.to_host(result, "x");
    };
    const auto values = [&](int64_t numel) { return values_of(comm, numel, at::kInt).to(dtype); };
    const at::Tensor own = values(7);
    at::Tensor all = torch::zeros({7 * size}, own.options());
    comm.all_gather(all, own, {}, "x").wait();
    keep("all-gather", all);
    all = torch::zeros({total}, own.options());
    comm.all_gather(all, values(uneven[rank]), uneven, "x").wait();
    keep("all-gather of uneven shards", all);
    const at::Tensor sent_by_root = values(11);
    comm.broadcast(sent_by_root, last, "x").wait();
    keep("broadcast", sent_by_root);
    const at::Tensor part = torch::zeros({uneven[rank]}, own.options());
    comm.scatter(part, rank == last ? values(total) : at::Tensor(), last, uneven, "x").wait();
    keep("scatter", part);
    all = torch::zeros({total_received}, own.options());
    comm.all_to_all(all, values(total_sent), received, sent, "x").wait();
    keep("all-to-all", all);
  }
  return results;
}

}  // namespace tessera::collectives
