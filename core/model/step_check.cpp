#include "core/model/step_check.h"

#include <algorithm>
#include <utility>

namespace tessera::internal {

// Attached to a parameter, in libtorch's slot for metadata of backends. The CPU and CUDA backends do not use the slot.
struct StepCheck::Mark : c10::BackendMeta {
  explicit Mark(std::function<void()> of_wrapper) : check(std::move(of_wrapper)) {}
  const std::function<void()> check;
};

StepCheck::StepCheck(std::function<void()> check) : mark_(c10::make_intrusive<Mark>(std::move(check))) {}

void StepCheck::attach(const at::Tensor& parameter) const {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  if (impl->get_backend_meta() != mark_.get()) impl->set_backend_meta(mark_);
}

bool StepCheck::is_replaced(const at::Tensor& parameter) const {
  const c10::BackendMeta* const attached = parameter.unsafeGetTensorImpl()->get_backend_meta();
  return attached != nullptr && attached != mark_.get();
}

void check_before_step(const std::vector<at::Tensor>& parameters) {
  std::vector<const StepCheck::Mark*> called;
  for (const at::Tensor& parameter : parameters) {
    const auto* mark = dynamic_cast<const StepCheck::Mark*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
    if (mark == nullptr || std::ranges::find(called, mark) != called.end()) continue;
    called.push_back(mark);
    mark->check();
  }
}

}  // namespace tessera::internal
