#include "core/gradients/gradient_part.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <stdexcept>
#include <utility>

#include "core/paging/boxed_tensors.h"
#include "core/paging/keyed_view.h"

namespace tessera::internal {
namespace {

// A dispatch key that libtorch does not use. All operators except those listed below ignore it, without overhead.
#define TESSERA_PART_KEY DeferredInit
constexpr auto kPartKey = c10::DispatchKey::TESSERA_PART_KEY;

// Marks a view from as_part_of_gradient(). Tensors from data() and detach() of the view reference the same mark.
struct GradientPart : c10::BackendMeta {
  explicit GradientPart(std::string name) : label(std::move(name)) {}
  const std::string label;
  bool norm_was_taken = false;
};

GradientPart* part_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPartKey)) return nullptr;
  return dynamic_cast<GradientPart*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// Calls `function` with the GradientPart of each tensor in an operator's first argument, if the tensor has one.
template <class Function>
void for_each_part(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const Function& function) {
  for_each_boxed_tensor(torch::jit::peek(stack, 0, op.schema().arguments().size()), [&](const at::Tensor& tensor) {
    if (GradientPart* part = part_of(tensor)) function(*part);
  });
}

void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPartKey), stack);
}

void take_norm(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_part(op, *stack, [](GradientPart& part) { part.norm_was_taken = true; });
  redispatch(op, keys, stack);
}

void scale(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::IValue& factor = torch::jit::peek(*stack, 1, op.schema().arguments().size());
  const bool is_number = !factor.isTensor() || factor.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  if (!is_number && factor.toTensor().dim() == 0)
    for_each_part(op, *stack, [](const GradientPart& part) {
      if (!part.norm_was_taken) return;
      throw std::logic_error(
          "the gradient of " + part.label +
          " would be scaled by a tensor that may come from its norm, which is that of this rank's part alone: call "
          "clip_grad_norm_() of the wrapper, of Zero or of OSS in place of torch::nn::utils::clip_grad_norm_ (or scale "
          "by a number, if it is the same on all ranks)");
    });
  redispatch(op, keys, stack);
}

TORCH_LIBRARY_IMPL(_, TESSERA_PART_KEY, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// Includes abs(), because clip_grad_norm_ computes the infinity norm by abs().max().
TORCH_LIBRARY_IMPL(aten, TESSERA_PART_KEY, library) {
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dtype", "linalg_vector_norm", "_foreach_norm.Scalar", "abs"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&take_norm>());
  for (const char* name : {"mul_.Tensor", "_foreach_mul_.Tensor"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&scale>());
}

}  // namespace

at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label) {
  at::Tensor part = keyed_view(gradient.storage(), kPartKey, gradient, gradient.storage_offset(), gradient.sizes(),
                               gradient.strides());
  part.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<GradientPart>(label));
  return part;
}

bool is_part_of_gradient(const at::Tensor& gradient) { return part_of(gradient) != nullptr; }

void forget_norm(const at::Tensor& gradient) {
  if (GradientPart* part = part_of(gradient)) part->norm_was_taken = false;
}

}  // namespace tessera::internal
