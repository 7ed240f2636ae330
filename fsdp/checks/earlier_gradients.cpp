#include "fsdp/checks/earlier_gradients.h"

#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "core/model/module_state.h"
#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {

void take_earlier_gradients(FlatParameter& flat) {
  const NoGradNoInferenceGuard quiet;
  std::vector<bool> has(flat.parameters().size());
  at::Tensor full;
  for (size_t i = 0; i < has.size(); ++i) {
    const at::Tensor grad = std::exchange(flat.parameters()[i].tensor.mutable_grad(), at::Tensor());
    has[i] = is_earlier_gradient(grad);
    if (!has[i]) continue;
    if (!full.defined())
      full = at::zeros({flat.layout().full_numel()}, at::TensorOptions().dtype(flat.dtype()).device(grad.device()));
    flat.view_in(full, i).copy_(grad.is_sparse() ? grad.to_dense() : grad);
  }
  if (!full.defined()) return;
  const at::Tensor own = flat.gradient().room(flat.dtype());
  own.copy_(flat.own_part_of(full));
  flat.gradient().accept(own, has);
}

}  // namespace tessera::internal
