#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

// What an optimizer tells those who keep its gradients.
enum class StepEvent { kWantsNorm, kBegins, kEnds };

// A mark on parameters, for wrappers whose optimizers do not know them: `hear` throws where gradients are not such that
// a step may take them, or their norm. It stays with the TensorImpls until another wrapper's.
class GradientKeeper {
 public:
  explicit GradientKeeper(std::function<void(StepEvent)> hear);
  // Leaves the mark, unless it is there: a change of the parameter's data takes it away.
  void keep(const at::Tensor& parameter) const;

 private:
  const c10::intrusive_ptr<c10::BackendMeta> mark_;
};

// Tells those who keep the gradients of these parameters, each once. Throws what they throw.
void tell_gradient_keepers(const std::vector<at::Tensor>& parameters, StepEvent event);

}  // namespace tessera
