#include "core/layout/example_shapes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "core/paging/boxed_tensors.h"

namespace tessera::internal {
namespace {

// Whether results are new tensors whose shapes need no values. Composite operators other than where() may read values.
bool shapes_need_no_values(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return false;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && op.schema().name() != "aten::where")
    return false;
  return std::ranges::all_of(op.schema().returns(), [](const c10::Argument& result) {
    return result.type()->kind() == c10::TypeKind::TensorType && result.alias_info() == nullptr;
  });
}

at::Tensor copy_on(const at::Tensor& tensor, at::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

// Returns a CPU tensor of valid values: zeros for integers (valid indices), else ones (valid weights of multinomial()).
at::Tensor example_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta()) return tensor;
  return copy_on(tensor, at::kCPU).fill_(at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) ? 0 : 1);
}

c10::IValue example_of(c10::IValue argument, const c10::Argument& parameter) {
  if (argument.isDevice() && argument.toDevice().is_meta()) return c10::Device(c10::kCPU);
  if (parameter.name() == "generator") return at::detail::createCPUGenerator();
  replace_boxed_tensors(argument, [](const at::Tensor& tensor) { return example_of(tensor); });
  return argument;
}

}  // namespace

void call_for_shapes(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& parameters = op.schema().arguments();
  const auto given = torch::jit::last(stack, parameters.size());
  torch::jit::Stack arguments(given.begin(), given.end());
  const size_t below = stack.size() - parameters.size();
  try {
    return op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    if (!shapes_need_no_values(op))
      throw std::logic_error("deferred(): libtorch cannot compute the shape of the result of " + op.schema().name() +
                             " without values: call it before deferred(), and fill from the result");
  }
  stack.resize(below);
  for (size_t i = 0; i < parameters.size(); ++i) arguments[i] = example_of(std::move(arguments[i]), parameters[i]);
  at::Generator common = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = [&] {
    const std::lock_guard lock(common.mutex());
    return common.get_state();
  }();
  const auto restore = c10::make_scope_exit([&] {
    const std::lock_guard lock(common.mutex());
    common.set_state(state);
  });
  op.callBoxed(arguments);
  for (c10::IValue& result : arguments)
    stack.emplace_back(result.toTensor().defined() ? copy_on(result.toTensor(), at::kMeta) : at::Tensor());
}

}  // namespace tessera::internal
