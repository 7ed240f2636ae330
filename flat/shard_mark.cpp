#include "tessera/flat/shard_mark.h"

namespace tessera {
namespace {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none.
struct ShardMark : c10::BackendMeta {};

}  // namespace

void mark_as_shard(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<ShardMark>());
}

bool is_shard(const at::Tensor& tensor) {
  return dynamic_cast<ShardMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

}  // namespace tessera
