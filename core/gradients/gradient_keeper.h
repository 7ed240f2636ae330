#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_map>
#include <vector>

namespace tessera::internal {

// What an optimizer tells those who keep its gradients.
enum class StepEvent { kWantsNorm, kBegins, kEnds };

// A mark on parameters, for wrappers whose optimizers do not know them: `hear` throws where gradients are not such that
// a step may take them, or their norm. It stays as long as this does, or until another wrapper's.
class GradientKeeper {
 public:
  explicit GradientKeeper(std::function<void(StepEvent)> hear);
  ~GradientKeeper();
  GradientKeeper(const GradientKeeper&) = delete;
  GradientKeeper& operator=(const GradientKeeper&) = delete;

  // Leaves the mark, unless it is there and the parameter has had the same data since.
  void keep(const at::Tensor& parameter);

 private:
  friend void tell_gradient_keepers(const std::vector<at::Tensor>& parameters, StepEvent event);
  struct Mark;
  struct Registry;

  const c10::intrusive_ptr<Mark> mark_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> kept_;  // so that nothing else is made where one was
};

// Tells those who keep the gradients of these parameters, each once. Throws what they throw.
void tell_gradient_keepers(const std::vector<at::Tensor>& parameters, StepEvent event);

}  // namespace tessera::internal
