#include "fsdp/cast_buffers.h"

#include <stdexcept>

#include "core/layout/unit_plan.h"

namespace tessera::internal {

void CastBuffers::cast(const torch::nn::Module& module, const FsdpOptions& options) {
  const at::ScalarType dtype = *options.mixed_precision.buffer_dtype;
  const auto exempt = modules_below(module, exempt_modules(options.mixed_precision));
  const auto ignored = modules_below(module, options.ignored_modules);
  std::map<const c10::TensorImpl*, at::ScalarType> own_dtypes;  // for a second name of a buffer that was already cast
  for (const auto& part : module.named_modules()) {
    if (exempt.contains(part.value().get()) || ignored.contains(part.value().get())) continue;
    for (const auto& entry : part.value()->named_buffers(/*recurse=*/false)) {
      at::Tensor buffer = entry.value();
      if (!buffer.defined() || !at::isFloatingType(buffer.scalar_type())) continue;
      const auto own = own_dtypes.try_emplace(buffer.unsafeGetTensorImpl(), buffer.scalar_type()).first->second;
      by_name_.emplace(join_names(part.key(), entry.key()), Entry{buffer, own});
      buffer.set_data(buffer.to(dtype));
    }
  }
}

at::Tensor CastBuffers::own_value(const std::string& name, const at::Tensor& value) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? value : value.to(found->second.own);
}

void CastBuffers::require_no_foreign_bytes(const std::string& rank) const {
  for (const auto& [name, entry] : by_name_) {
    const auto& [buffer, own] = entry;
    const at::ScalarType dtype = buffer.scalar_type();
    if (c10::elementSize(dtype) == c10::elementSize(own) || buffer.numel() == 0) continue;
    if (!buffer.has_storage() ||
        buffer.storage().nbytes() != static_cast<size_t>(buffer.numel()) * c10::elementSize(own))
      continue;
    throw std::logic_error("buffer '" + name + "' on rank " + rank + " was given the bytes of " + c10::toString(own) +
                           " values (by torch::load()), expected " + c10::toString(dtype) +
                           ", which FsdpOptions::mixed_precision.buffer_dtype has cast it to: load before wrapping, or "
                           "with load_checkpoint()");
  }
}

}  // namespace tessera::internal
