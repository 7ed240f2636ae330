#include "tessera/comm/uneven_data.h"

#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

namespace tessera {

int ranks_with_data(Communicator& comm, bool has_data) {
  c10::InferenceMode quiet;
  at::Tensor count = at::full({1}, has_data ? 1 : 0, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  comm.all_reduce(count, ReduceOp::kSum, "the number of ranks with data").wait();
  return static_cast<int>(comm.to_host(count, "the number of ranks with data").item<int64_t>());
}

}  // namespace tessera
