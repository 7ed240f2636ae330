#include "tessera/flat/gradient_keeper.h"

#include <unordered_set>
#include <utility>

namespace tessera {
namespace {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none.
struct KeeperMark : c10::BackendMeta {
  explicit KeeperMark(std::function<void(StepEvent)> ear) : hear(std::move(ear)) {}
  const std::function<void(StepEvent)> hear;
};

}  // namespace

GradientKeeper::GradientKeeper(std::function<void(StepEvent)> hear)
    : mark_(c10::make_intrusive<KeeperMark>(std::move(hear))) {}

void GradientKeeper::keep(const at::Tensor& parameter) const {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  if (impl->get_backend_meta() != mark_.get()) impl->set_backend_meta(mark_);
}

void tell_gradient_keepers(const std::vector<at::Tensor>& parameters, StepEvent event) {
  std::unordered_set<const KeeperMark*> told;
  for (const at::Tensor& parameter : parameters) {
    const auto* mark = dynamic_cast<const KeeperMark*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
    if (mark != nullptr && told.insert(mark).second) mark->hear(event);
  }
}

}  // namespace tessera
