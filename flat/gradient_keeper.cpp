#include "tessera/flat/gradient_keeper.h"

#include <unordered_set>
#include <utility>

namespace tessera {
namespace {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none.
struct Note : c10::BackendMeta {
  explicit Note(std::function<void(bool steps)> ask) : require_ready(std::move(ask)) {}
  const std::function<void(bool steps)> require_ready;
};

}  // namespace

GradientKeeper::GradientKeeper(std::function<void(bool steps)> require_ready)
    : note_(c10::make_intrusive<Note>(std::move(require_ready))) {}

void GradientKeeper::keep(const at::Tensor& parameter) const {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  if (impl->get_backend_meta() != note_.get()) impl->set_backend_meta(note_);
}

void require_ready_gradients(const std::vector<at::Tensor>& parameters, bool steps) {
  std::unordered_set<const Note*> asked;
  for (const at::Tensor& parameter : parameters) {
    const auto* note = dynamic_cast<const Note*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
    if (note != nullptr && asked.insert(note).second) note->require_ready(steps);
  }
}

}  // namespace tessera
