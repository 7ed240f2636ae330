#include "core/gradients/gradient_keeper.h"

#include <mutex>
#include <unordered_set>
#include <utility>

namespace tessera::internal {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none. By it keep() sees at a glance
// that nothing has changed.
struct GradientKeeper::Mark : c10::BackendMeta {
  explicit Mark(std::function<void(StepEvent)> ear) : hear(std::move(ear)) {}
  const std::function<void(StepEvent)> hear;
};

// What set_data() cannot take away, as it does what hangs on the tensor.
struct GradientKeeper::Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, c10::intrusive_ptr<Mark>> marks;

  static Registry& of_process() {
    static auto* const registry = new Registry;
    return *registry;
  }
};

GradientKeeper::GradientKeeper(std::function<void(StepEvent)> hear)
    : mark_(c10::make_intrusive<Mark>(std::move(hear))) {}

GradientKeeper::~GradientKeeper() {
  Registry& registry = Registry::of_process();
  const std::lock_guard lock(registry.mutex);
  for (const auto& [impl, parameter] : kept_) {
    const auto found = registry.marks.find(impl);
    if (found != registry.marks.end() && found->second == mark_) registry.marks.erase(found);
  }
}

void GradientKeeper::keep(const at::Tensor& parameter) {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  if (impl->get_backend_meta() == mark_.get()) return;
  impl->set_backend_meta(mark_);
  Registry& registry = Registry::of_process();
  const std::lock_guard lock(registry.mutex);
  kept_.emplace(impl, parameter);
  registry.marks[impl] = mark_;
}

void tell_gradient_keepers(const std::vector<at::Tensor>& parameters, StepEvent event) {
  std::vector<c10::intrusive_ptr<GradientKeeper::Mark>> told;
  {
    auto& registry = GradientKeeper::Registry::of_process();
    const std::lock_guard lock(registry.mutex);
    std::unordered_set<const GradientKeeper::Mark*> seen;
    for (const at::Tensor& parameter : parameters) {
      const auto found = registry.marks.find(parameter.unsafeGetTensorImpl());
      if (found != registry.marks.end() && seen.insert(found->second.get()).second) told.push_back(found->second);
    }
  }
  for (const auto& mark : told) mark->hear(event);
}

}  // namespace tessera::internal
