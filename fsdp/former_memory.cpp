#include "fsdp/former_memory.h"

#include <unordered_map>

#include "core/layout/deferred.h"

namespace tessera::internal {

FormerMemory::FormerMemory(const std::vector<PlannedParameter>& parameters) {
  std::unordered_map<const c10::StorageImpl*, size_t> known;
  for (const PlannedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (is_deferred(tensor) || !tensor.has_storage() || tensor.numel() == 0) continue;
    const c10::Storage& storage = tensor.storage();
    const auto [found, is_new] = known.try_emplace(storage.unsafeGetStorageImpl(), memories_.size());
    if (is_new) memories_.push_back({storage.getWeakStorageImpl(), parameter.fqn});
    memories_[found->second].parameter_bytes += tensor.nbytes();
  }
}

void FormerMemory::refuse_use(const std::string& who, int rank) const {
  for (const Memory& memory : memories_) {
    const auto storage = memory.storage.lock();
    if (!storage || storage->nbytes() > memory.parameter_bytes) continue;
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "a tensor that shares memory with parameter '" + memory.fqn + "' on rank " + std::to_string(rank) +
        " (a view, a detach(), another model) was made before " + who +
        " wrapped the module, and is used now: it would show the values of then, since the parameter's are in shards: "
        "make it after wrapping, or in forward");
  }
}

}  // namespace tessera::internal
