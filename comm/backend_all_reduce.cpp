#include "tessera/comm/backend_all_reduce.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace tessera {

Pending backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what) {
  if (!tensor.defined() || tensor.device() != comm.device() || !tensor.is_contiguous())
    throw std::invalid_argument("backend all-reduce on rank " + std::to_string(comm.rank()) +
                                ": expected a contiguous tensor on " + comm.device().str());
  if (comm.size() == 1) return {};
  auto* backend = dynamic_cast<BackendCollectives*>(&comm);
  if (backend == nullptr) throw std::invalid_argument("this communicator's backend has no all-reduce of its own");
  return backend->start_backend_all_reduce(tensor.detach().view({-1}), std::string(what));
}

}  // namespace tessera
