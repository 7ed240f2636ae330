#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

// A mark on parameters, for wrappers whose optimizers do not know them: `require_ready` throws where gradients are not
// such that a step may take them, and is told whether one does. It stays with the TensorImpls until another wrapper's.
class GradientKeeper {
 public:
  explicit GradientKeeper(std::function<void(bool steps)> require_ready);
  // Leaves the mark, unless it is there: a change of the parameter's data takes it away.
  void keep(const at::Tensor& parameter) const;

 private:
  const c10::intrusive_ptr<c10::BackendMeta> mark_;
};

// Asks those who keep the gradients of these parameters, each once: for a step, or for their norm. Throws what they
// throw.
void require_ready_gradients(const std::vector<at::Tensor>& parameters, bool steps);

}  // namespace tessera
