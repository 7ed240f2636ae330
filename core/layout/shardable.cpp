#include "core/layout/shardable.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <unordered_map>

#include "core/layout/deferred.h"
#include "core/layout/shard_mark.h"
#include "core/paging/residency.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

std::string problem_of(const at::Tensor& tensor, const Communicator& comm, bool may_be_deferred) {
  if (is_shard(tensor))
    return "is a shard of FullyShardedDataParallel, whose optimizer state is sharded already: give its parameters() to "
           "the optimizer itself";
  if (is_paged(tensor)) return "is sharded already, by another wrapper";
  if (tensor.is_inference())
    return "was made in InferenceMode, and cannot take part in autograd later: build the module outside of it (a "
           "frozen one too), or under NoGradGuard";
  if (is_deferred(tensor) && may_be_deferred) return "";
  if (is_deferred(tensor))
    return "is deferred, which FullyShardedDataParallel alone fills: call materialize() on the module first";
  if (tensor.device() != comm.device())
    return c10::str("is on ", tensor.device(), ", expected the communicator's device, ", comm.device());
  if (!tensor.is_leaf()) return "is the result of an operation, expected a leaf";
  if (tensor.requires_grad() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    return "is expanded: several of its elements are one in memory, which no optimizer can write: register a "
           "contiguous() copy";
  return "";
}

struct Extent {
  size_t begin_bytes, end_bytes;
  const PlannedParameter* parameter;
};

Extent extent_of(const at::Tensor& tensor, const PlannedParameter* parameter) {
  const size_t begin_bytes = tensor.storage_offset() * tensor.element_size();
  return {begin_bytes,
          begin_bytes + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size()),
          parameter};
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && !is_deferred(tensor) && tensor.has_storage() && !tensor.is_nested() && tensor.numel() > 0;
}

}  // namespace

void require_strided(const std::string& label, const at::Tensor& tensor) {
  const std::string kind = !tensor.defined()                          ? "is undefined"
                           : tensor.layout() != at::kStrided          ? c10::str("has layout ", tensor.layout())
                           : tensor.is_nested()                       ? "is nested"
                           : tensor.is_quantized()                    ? "is quantized"
                           : tensor.is_meta() && !is_deferred(tensor) ? "is on meta"
                                                                      : "";
  require(kind.empty(), label, " ", kind,
          ", expected a strided one with values: register its parts, or a dense tensor");
}

void require_shardable(const std::vector<PlannedParameter>& parameters, const Communicator& comm,
                       const std::string& who, bool may_be_deferred) {
  auto label = [&](const PlannedParameter& parameter) {
    return who + ": parameter '" + parameter.fqn + "' on rank " + std::to_string(comm.rank());
  };
  std::unordered_map<const c10::StorageImpl*, std::vector<Extent>> by_storage;
  for (const PlannedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    require_strided(label(parameter), tensor);
    const std::string problem = problem_of(tensor, comm, may_be_deferred);
    require(problem.empty(), label(parameter), " ", problem);
    if (has_memory(tensor))
      by_storage[tensor.storage().unsafeGetStorageImpl()].push_back(extent_of(tensor, &parameter));
  }
  for (auto& [storage, extents] : by_storage) {
    std::ranges::sort(extents, {}, &Extent::begin_bytes);
    for (size_t i = 1; i < extents.size(); ++i)
      require(extents[i].begin_bytes >= extents[i - 1].end_bytes, label(*extents[i].parameter), " shares memory with '",
              extents[i - 1].parameter->fqn, "' without being the same tensor, and would be torn from it: to tie ",
              "them, register one tensor under both names");
  }
}

void require_apart(const torch::OrderedDict<std::string, at::Tensor>& others, const std::string& kind,
                   const std::vector<PlannedParameter>& parameters, const std::string& who, int rank) {
  std::unordered_multimap<const c10::StorageImpl*, Extent> by_storage;
  for (const PlannedParameter& parameter : parameters)
    if (has_memory(parameter.tensor))
      by_storage.emplace(parameter.tensor.storage().unsafeGetStorageImpl(), extent_of(parameter.tensor, &parameter));
  for (const auto& other : others) {
    if (!has_memory(other.value())) continue;
    const Extent own = extent_of(other.value(), nullptr);
    const auto [begin, end] = by_storage.equal_range(other.value().storage().unsafeGetStorageImpl());
    for (auto at = begin; at != end; ++at)
      require(own.begin_bytes >= at->second.end_bytes || at->second.begin_bytes >= own.end_bytes, who, ": ", kind, " '",
              other.key(), "' on rank ", rank, " shares memory with parameter '", at->second.parameter->fqn,
              "', and would keep the values of now: make it of the parameter in forward, or register a clone()");
  }
}

}  // namespace tessera::internal
