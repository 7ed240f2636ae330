#include "tessera/flat/shardable.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include "tessera/flat/deferred.h"
#include "tessera/flat/shard_mark.h"
#include "tessera/paging/residency.h"

namespace tessera {
namespace {

std::string problem_of(const at::Tensor& tensor, const Communicator& comm, bool may_be_deferred) {
  std::ostringstream problem;
  if (!tensor.defined()) {
    problem << "is undefined";
  } else if (is_shard(tensor)) {
    problem
        << "is a shard of FullyShardedDataParallel, whose optimizer state is sharded already: give its parameters() "
           "to the optimizer itself";
  } else if (is_paged(tensor)) {
    problem << "is sharded already, by another wrapper";
  } else if (tensor.layout() != at::kStrided) {
    problem << "has layout " << tensor.layout() << ", expected a dense one";
  } else if (is_deferred(tensor)) {
    if (!may_be_deferred)
      problem << "is deferred, which FullyShardedDataParallel alone fills: call materialize() on the module first";
  } else if (tensor.device() != comm.device()) {
    problem << "is on " << tensor.device() << ", expected the communicator's device, " << comm.device();
  } else if (!tensor.is_leaf()) {
    problem << "is the result of an operation, expected a leaf";
  }
  return problem.str();
}

struct Extent {
  int64_t begin_bytes, end_bytes;
  const PlannedParameter* parameter;
};

int64_t extent_numel(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return last + 1;
}

}  // namespace

void require_shardable(const std::vector<PlannedParameter>& parameters, const Communicator& comm,
                       const std::string& who, bool may_be_deferred) {
  auto label = [&](const PlannedParameter& parameter) {
    return who + ": parameter '" + parameter.fqn + "' on rank " + std::to_string(comm.rank());
  };
  std::unordered_map<const c10::StorageImpl*, std::vector<Extent>> by_storage;
  for (const PlannedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (const std::string problem = problem_of(tensor, comm, may_be_deferred); !problem.empty())
      throw std::invalid_argument(label(parameter) + " " + problem);
    if (is_deferred(tensor) || tensor.numel() == 0) continue;
    const auto element_bytes = static_cast<int64_t>(tensor.element_size());
    const int64_t begin = tensor.storage_offset() * element_bytes;
    by_storage[tensor.storage().unsafeGetStorageImpl()].push_back(
        {begin, begin + extent_numel(tensor) * element_bytes, &parameter});
  }
  for (auto& [storage, extents] : by_storage) {
    std::sort(extents.begin(), extents.end(),
              [](const Extent& a, const Extent& b) { return a.begin_bytes < b.begin_bytes; });
    for (size_t i = 1; i < extents.size(); ++i)
      if (extents[i].begin_bytes < extents[i - 1].end_bytes)
        throw std::invalid_argument(label(*extents[i].parameter) + " shares memory with '" +
                                    extents[i - 1].parameter->fqn +
                                    "' without being the same tensor, and would be torn from it: to tie them, register "
                                    "one tensor under both names");
  }
}

}  // namespace tessera
