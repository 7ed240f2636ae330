#include <tessera/host_results.h>

#include <ATen/ops/empty.h>

#include <cstdint>
#include <vector>

namespace tessera {
using namespace internal;

at::Tensor reduce_to_host(Communicator& comm, const at::Tensor& own, ReduceOp op, std::string_view what) {
  const at::Tensor travels = own.to(comm.device());
  comm.all_reduce(travels, op, what).wait();
  return comm.to_host(travels, what);
}

at::Tensor gather_to_host(Communicator& comm, const at::Tensor& own, std::string_view what) {
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), comm.size());
  const at::Tensor travels = own.to(comm.device());
  const at::Tensor all = at::empty(sizes, travels.options());
  comm.all_gather(all, travels, {}, what).wait();
  return comm.to_host(all, what);
}

}  // namespace tessera
