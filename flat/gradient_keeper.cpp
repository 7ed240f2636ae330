#include "tessera/flat/gradient_keeper.h"

#include <unordered_set>
#include <utility>

namespace tessera {
namespace {

// libtorch lets backends hang a value of their own on a tensor; CPU and CUDA have none.
struct GradientKeeper : c10::BackendMeta {
  explicit GradientKeeper(std::function<void()> ask) : require_ready(std::move(ask)) {}
  const std::function<void()> require_ready;
};

}  // namespace

void keep_gradients_of(const std::vector<at::Tensor>& parameters, std::function<void()> require_ready) {
  const auto keeper = c10::make_intrusive<GradientKeeper>(std::move(require_ready));
  for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->set_backend_meta(keeper);
}

void require_ready_gradients(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const GradientKeeper*> asked;
  for (const at::Tensor& parameter : parameters) {
    const auto* keeper = dynamic_cast<const GradientKeeper*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
    if (keeper != nullptr && asked.insert(keeper).second) keeper->require_ready();
  }
}

}  // namespace tessera
