#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <optional>
#include <utility>

// Functions on the tensors among an operator's boxed arguments and results. A boxed value may be a tensor, a list of
// tensors, or a list of optional tensors (the indices of an indexing operator).
namespace tessera::internal {

// Whether the operator writes to the tensors of an argument.
inline bool is_written_to(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return false;
  return alias->isWrite() || std::ranges::any_of(alias->containedTypes(), &c10::AliasInfo::isWrite);  // list elements
}

// Calls visit(const at::Tensor&) for each defined tensor in the value.
template <class Visit>
void for_each_boxed_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& element : value.toListRef())
      if (element.isTensor() && element.toTensor().defined()) visit(element.toTensor());
  }
}

// Replaces each tensor in `value` by of(tensor), in order. `of` is also called with undefined tensors, and may return
// undefined tensors. Makes a new list instead of changing a list, because other values may share the list.
template <class Of>
void replace_boxed_tensors(c10::IValue& value, Of&& of) {
  if (value.isTensor()) {
    value = of(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& element : value.toListRef()) list.push_back(of(element.toTensor()));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& element : value.toListRef()) {
      at::Tensor tensor = of(element.isTensor() ? element.toTensor() : at::Tensor());
      list.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
    }
    value = std::move(list);
  }
}

}  // namespace tessera::internal
