#include <tessera/sdp.h>

#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>

#include "core/model/shard_norm.h"
#include "core/runtime/dtypes.h"
#include "core/runtime/require.h"
#include "sdp/replicated/replicated_gradients.h"

namespace tessera::internal {
namespace {

std::string describe(const SdpOptions& options) {
  return c10::str("reduce_bucket_bytes=", options.reduce_bucket_bytes, " wire=", static_cast<int>(options.wire),
                  " reduce_dtype=", options.reduce_dtype ? c10::toString(*options.reduce_dtype) : "none",
                  " broadcast_buffers=", options.broadcast_buffers,
                  " sync_models_at_startup=", options.sync_models_at_startup,
                  " zero_copy_bytes=", options.zero_copy_bytes,
                  " compare_replicas_every=", ReplicaComparison(options.compare_replicas_every).every());
}

const SdpOptions& checked(const SdpOptions& options) {
  require(options.reduce_bucket_bytes >= 0, "SdpOptions::reduce_bucket_bytes is ", options.reduce_bucket_bytes,
          ", expected 0 (off) or more");
  if (options.reduce_dtype && options.wire != WireFormat::kDtype)
    throw std::invalid_argument(std::string("SdpOptions::reduce_dtype is ") + c10::toString(*options.reduce_dtype) +
                                ", and SdpOptions::wire is kInt8Blocks: gradients travel in one of them");
  require_training_dtype("SdpOptions::reduce_dtype", options.reduce_dtype);
  return options;
}

}  // namespace

SdpModule::SdpModule(torch::nn::Module& module, std::vector<ShardedOptimizer*> optimizers,
                     std::shared_ptr<Communicator> comm, const SdpOptions& options)
    : ReplicatedModule(module, std::move(comm),
                       {"ShardedDataParallel", describe(checked(options)), options.sync_models_at_startup,
                        options.broadcast_buffers}),
      optimizers_(references_to(optimizers, planned_parameters(), *this->comm())) {
  for (const PlannedParameter& parameter : planned_parameters())
    if (parameter.tensor.requires_grad()) owner_of(parameter);
  ReplicatedOptions replicated;
  replicated.limits.bucket_bytes = options.reduce_bucket_bytes;
  replicated.wire_dtype = options.reduce_dtype;
  replicated.wire = options.wire;
  replicated.reducer.zero_copy_bytes = options.zero_copy_bytes;
  replicated.compare_replicas_every = options.compare_replicas_every;
  replicated.copies_are_equal =
      std::ranges::none_of(optimizers_, [](const Reference& one) { return one.optimizer->rounds_copies(); });
  reduce_gradients([this](const PlannedParameter& parameter) { return owner_of(parameter); }, replicated);
}

std::vector<SdpModule::Reference> SdpModule::references_to(const std::vector<ShardedOptimizer*>& optimizers,
                                                           const std::vector<PlannedParameter>& parameters,
                                                           const Communicator& comm) {
  std::vector<Reference> references;
  for (ShardedOptimizer* optimizer : optimizers) {
    if (optimizer == nullptr) throw std::invalid_argument("ShardedDataParallel: an optimizer is null");
    if (optimizer->comm().get() != &comm)
      throw std::invalid_argument("ShardedDataParallel: an optimizer has another communicator than the wrapper");
    const auto first = std::ranges::find_if(
        parameters, [&](const PlannedParameter& parameter) { return optimizer->has(parameter.tensor); });
    references.push_back({optimizer, optimizer->lifetime(), first == parameters.end() ? "" : first->fqn});
  }
  return references;
}

// Throws std::logic_error if an optimizer was destroyed: gradients would still be reduced to the owners that it chose.
void SdpModule::require_optimizers() const {
  for (const Reference& reference : optimizers_)
    require<std::logic_error>(!reference.lifetime.expired(), "ShardedDataParallel on rank ", comm()->rank(),
                              ": the optimizer of parameter '", reference.first_parameter,
                              "' no longer exists: wrap the module again, with the optimizer that took its place");
}

int SdpModule::owner_of(const PlannedParameter& parameter) const {
  const ShardedOptimizer* found = nullptr;
  for (const auto& [optimizer, lifetime, first] : optimizers_) {
    if (lifetime.expired() || !optimizer->has(parameter.tensor)) continue;
    require(found == nullptr, "ShardedDataParallel on rank ", comm()->rank(), ": parameter '", parameter.fqn,
            "' is in two of the optimizers");
    found = optimizer;
  }
  require(
      found != nullptr, "ShardedDataParallel on rank ", comm()->rank(), ": parameter '", parameter.fqn,
      "' requires a gradient but is in none of the optimizers, so that no rank owns it: add it to one, or freeze it");
  return found->owner(parameter.tensor);
}

void SdpModule::refresh_trainable() { gradients().refresh_trainable(); }

GradNorm SdpModule::clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) {
  require_optimizers();
  gradients().require_averages();
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> owned;
  for (const PlannedParameter& parameter : planned_parameters()) {
    if (!parameter.tensor.grad().defined()) continue;
    for (const Reference& reference : optimizers_)
      if (reference.optimizer->has(parameter.tensor) && reference.optimizer->owns(parameter.tensor))
        owned.push_back(parameter.tensor.grad());
  }
  return clip_shards_by_norm(owned, max_norm, norm_type, error_if_nonfinite, *comm());
}

MemoryReport SdpModule::memory() const {
  MemoryReport report = ReplicatedModule::memory();
  for (const auto& [optimizer, lifetime, first] : optimizers_) {
    if (lifetime.expired()) continue;
    report.host_bytes += optimizer->host_bytes();
    report.pinned_bytes += optimizer->pinned_bytes();
  }
  return report;
}

}  // namespace tessera::internal
