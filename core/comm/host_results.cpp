#include <tessera/host_results.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <vector>

namespace tessera {
using namespace internal;

at::Tensor reduce_to_host(Communicator& comm, const at::Tensor& own, ReduceOp op, std::string_view what) {
  const at::Tensor travels = own.defined() ? own.to(comm.device()).contiguous() : own;
  comm.all_reduce(travels, op, what).wait();
  return comm.to_host(travels, what);
}

at::Tensor gather_to_host(Communicator& comm, const at::Tensor& own, std::string_view what) {
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), comm.size());
  const at::Tensor travels = own.defined() ? own.to(comm.device()).contiguous() : own;
  const at::Tensor all = own.defined() ? at::empty(sizes, travels.options()) : own;
  comm.all_gather(all, travels, {}, what).wait();
  return comm.to_host(all, what);
}

int ranks_with_data(Communicator& comm, bool has_data) {
  c10::InferenceMode quiet;
  const at::Tensor own = at::full({1}, has_data ? 1 : 0, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  return static_cast<int>(reduce_to_host(comm, own, ReduceOp::kSum, "the number of ranks with data").item<int64_t>());
}

}  // namespace tessera
