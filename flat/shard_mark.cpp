#include "tessera/flat/shard_mark.h"

namespace tessera {
namespace {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none.
struct ShardMark : c10::BackendMeta {
  explicit ShardMark(NarrowPart part) : narrow(std::move(part)) {}
  NarrowPart narrow;
};

const ShardMark* mark_of(const at::Tensor& tensor) {
  return dynamic_cast<const ShardMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace

void mark_as_shard(const at::Tensor& tensor, NarrowPart narrow) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<ShardMark>(std::move(narrow)));
}

bool is_shard(const at::Tensor& tensor) { return mark_of(tensor) != nullptr; }

const NarrowPart* narrow_copy_of(const at::Tensor& tensor) {
  const ShardMark* mark = mark_of(tensor);
  return mark != nullptr && mark->narrow.values.defined() ? &mark->narrow : nullptr;
}

}  // namespace tessera
