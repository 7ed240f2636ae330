#include "core/gradients/gradient_part.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include <tessera/communicator.h>
#include "core/paging/boxed_tensors.h"
#include "core/paging/keyed_view.h"

namespace tessera::internal {
namespace {

// A key that libtorch knows and does not use. Operators fall through it, which costs nothing, but for those below.
#define TESSERA_PART_KEY DeferredInit
constexpr auto kPartKey = c10::DispatchKey::TESSERA_PART_KEY;

// libtorch hangs it on the tensor, and on those that data() and detach() make of it.
struct GradientPart : c10::BackendMeta {
  explicit GradientPart(std::string name) : label(std::move(name)) {}
  const std::string label;
  std::optional<uint64_t> collectives_at_norm;  // of this thread, when a norm of the gradient was taken
  bool is_joined = false;                       // one after the other with those of other parameters
};

GradientPart* part_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPartKey)) return nullptr;
  return dynamic_cast<GradientPart*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

template <class Function>
void for_each_part(const c10::IValue& value, const Function& function) {
  for_each_boxed_tensor(value, [&](const at::Tensor& tensor) {
    if (GradientPart* part = part_of(tensor)) function(*part);
  });
}

void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPartKey), stack);
}

void take_norm(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_part(torch::jit::peek(*stack, 0, op.schema().arguments().size()),
                [](GradientPart& part) { part.collectives_at_norm = Communicator::begun_by_this_thread(); });
  redispatch(op, keys, stack);
}

void scale(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  const c10::IValue& factor = torch::jit::peek(*stack, 1, arguments);
  if (factor.isTensor() && factor.toTensor().dim() == 0 &&
      !factor.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
    for_each_part(torch::jit::peek(*stack, 0, arguments), [](const GradientPart& part) {
      if (part.collectives_at_norm != Communicator::begun_by_this_thread()) return;
      throw std::logic_error(
          "the gradient of " + part.label +
          " would be scaled by a tensor that may come from its norm, which is that of this rank's part alone: call "
          "clip_grad_norm_() of the wrapper, of Zero or of OSS in place of torch::nn::utils::clip_grad_norm_ (or scale "
          "by a number, if it is the same on all ranks)");
    });
  redispatch(op, keys, stack);
}

// The view has the key without this: the same part.
void view(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::Tensor gradient = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  redispatch(op, keys, stack);
  const at::Tensor& result = torch::jit::peek(*stack, 0, 1).toTensor();
  if (part_of(gradient) != nullptr && result.key_set().has(kPartKey))
    result.unsafeGetTensorImpl()->set_backend_meta(gradient.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

// One vector of all gradients, as torch::optim::LBFGS makes it.
void join(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::string label;
  for_each_part(torch::jit::peek(*stack, 0, op.schema().arguments().size()), [&](const GradientPart& part) {
    if (label.empty()) label = part.label;
  });
  redispatch(op, keys, stack);
  const at::Tensor whole = torch::jit::pop(*stack).toTensor();
  if (label.empty() || whole.dim() != 1 || whole.requires_grad()) return torch::jit::push(*stack, whole);
  const at::Tensor marked = as_part_of_gradient(whole, label);
  part_of(marked)->is_joined = true;
  torch::jit::push(*stack, marked);
}

void multiply(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < arguments; ++i)
    for_each_part(torch::jit::peek(*stack, i, arguments), [](const GradientPart& part) {
      if (!part.is_joined) return;
      throw std::logic_error(
          "an inner product of gradients one after the other, the first that of " + part.label +
          ", would be that of this rank's part alone, as torch::optim::LBFGS takes it: use tessera::Lbfgs, given the "
          "wrapper (of your own sums over ranks, add up norms)");
    });
  redispatch(op, keys, stack);
}

TORCH_LIBRARY_IMPL(_, TESSERA_PART_KEY, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, TESSERA_PART_KEY, library) {
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype",
                           "linalg_vector_norm", "_foreach_norm.Scalar"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&take_norm>());
  for (const char* name : {"mul_.Tensor", "div_.Tensor", "_foreach_mul_.Tensor"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&scale>());
  library.impl("view", torch::CppFunction::makeFromBoxedFunction<&view>());
  library.impl("cat", torch::CppFunction::makeFromBoxedFunction<&join>());
  for (const char* name : {"dot", "vdot"}) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&multiply>());
}

}  // namespace

at::Tensor as_part_of_gradient(const at::Tensor& gradient, const std::string& label) {
  at::Tensor part = keyed_view(gradient.storage(), kPartKey, gradient, gradient.storage_offset(), gradient.sizes(),
                               gradient.strides());
  part.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<GradientPart>(label));
  return part;
}

void forget_norm(const at::Tensor& gradient) {
  if (GradientPart* part = part_of(gradient)) part->collectives_at_norm.reset();
}

}  // namespace tessera::internal
