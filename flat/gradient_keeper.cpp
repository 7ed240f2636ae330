#include "tessera/flat/gradient_keeper.h"

#include <unordered_set>
#include <utility>

namespace tessera {
namespace {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none.
struct KeeperMark : c10::BackendMeta {
  explicit KeeperMark(std::function<void(bool steps)> ask) : require_ready(std::move(ask)) {}
  const std::function<void(bool steps)> require_ready;
};

}  // namespace

GradientKeeper::GradientKeeper(std::function<void(bool steps)> require_ready)
    : mark_(c10::make_intrusive<KeeperMark>(std::move(require_ready))) {}

void GradientKeeper::keep(const at::Tensor& parameter) const {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  if (impl->get_backend_meta() != mark_.get()) impl->set_backend_meta(mark_);
}

void require_ready_gradients(const std::vector<at::Tensor>& parameters, bool steps) {
  std::unordered_set<const KeeperMark*> asked;
  for (const at::Tensor& parameter : parameters) {
    const auto* mark = dynamic_cast<const KeeperMark*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
    if (mark != nullptr && asked.insert(mark).second) mark->require_ready(steps);
  }
}

}  // namespace tessera
