#include "tests/support/accelerator/kernel_arguments.h"

#include <ATen/Context.h>

namespace tessera::accelerator {
using namespace internal;

KernelArguments::KernelArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) : schema_(schema) {
  const auto last = torch::jit::last(stack, schema.arguments().size());
  values_.assign(last.begin(), last.end());
  for (size_t i = 0; i < values_.size(); ++i) {
    const bool writes = is_written_to(schema.arguments()[i]);
    for_each_boxed_tensor(values_[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      accesses_.push_back(access_of(tensor, writes));
      if (!device_) device_ = tensor.device().index();
    });
    if (values_[i].isDevice() && !device_ && values_[i].toDevice().has_index()) device_ = values_[i].toDevice().index();
  }
  for (size_t i = 0; i < values_.size(); ++i) {
    const auto& type = schema.arguments()[i].type();
    const auto optional = type->cast<c10::OptionalType>();
    if ((optional ? optional->getElementType() : type)->kind() != c10::TypeKind::GeneratorType) continue;
    draws_ = true;
    const at::Generator& own = at::globalContext().defaultGenerator(
        {at::kCUDA, static_cast<c10::DeviceIndex>(device_.value_or(current_device()))});
    if (values_[i].isNone()) values_[i] = own;
    TORCH_CHECK(values_[i].toGenerator() == own, "Expected a 'cuda' device type for generator but found 'cpu'");
  }
}

torch::jit::Stack KernelArguments::written_results() const {
  torch::jit::Stack results;
  for (const c10::Argument& result : schema_.returns()) {
    if (result.alias_info() == nullptr) continue;
    for (size_t i = 0; i < values_.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) {
        results.push_back(values_[i]);
        break;
      }
    }
  }
  TORCH_CHECK(results.size() == schema_.returns().size(), "simulated accelerator: ", schema_.name(),
              " returns new tensors beside those that it writes to");
  return results;
}

}  // namespace tessera::accelerator
