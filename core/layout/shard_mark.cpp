#include "core/layout/shard_mark.h"

#include <tessera/model/model_shards.h>

namespace tessera {
namespace internal {
namespace {

// libtorch lets a backend attach one object to a tensor. The CPU and CUDA backends attach none, so the slot is free.
struct ShardMark : c10::BackendMeta {
  ShardMark(std::string name, std::vector<int64_t> whole, LowPrecisionPart part)
      : label(std::move(name)), whole_sizes(std::move(whole)), low_precision(std::move(part)) {}
  const std::string label;
  const std::vector<int64_t> whole_sizes;
  const LowPrecisionPart low_precision;
};

const ShardMark* mark_of(const at::Tensor& tensor) {
  return dynamic_cast<const ShardMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace

void mark_as_shard(const at::Tensor& tensor, std::string label, std::vector<int64_t> whole_sizes,
                   LowPrecisionPart low_precision) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<ShardMark>(std::move(label), std::move(whole_sizes), std::move(low_precision)));
}

bool is_shard(const at::Tensor& tensor) { return mark_of(tensor) != nullptr; }
const std::string& shard_label(const at::Tensor& tensor) { return mark_of(tensor)->label; }

const LowPrecisionPart* low_precision_copy_of(const at::Tensor& tensor) {
  const ShardMark* mark = mark_of(tensor);
  return mark != nullptr && mark->low_precision.values.defined() ? &mark->low_precision : nullptr;
}

}  // namespace internal

std::vector<int64_t> whole_sizes(const at::Tensor& parameter) {
  const internal::ShardMark* mark = internal::mark_of(parameter);
  return mark != nullptr ? mark->whole_sizes : parameter.sizes().vec();
}

}  // namespace tessera
