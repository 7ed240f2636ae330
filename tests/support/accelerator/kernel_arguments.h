// The arguments of an operator, converted to run its CPU kernel on a stream's thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/paging/boxed_tensors.h"
#include "tests/support/accelerator/streams.h"

namespace tessera::accelerator {
using namespace internal;

// Returns a CPU tensor with the tensor's memory at the address for kernels (memory.h). Does not own the memory.
at::Tensor for_kernels(const at::Tensor& tensor);
Access access_of(const at::Tensor& tensor, bool writes);
// Returns for_kernels() of a device's tensor, or a copy of a host's scalar, which a kernel reads at launch.
inline at::Tensor for_kernels_or_copy(const at::Tensor& tensor) {
  if (tensor.is_cuda()) return for_kernels(tensor);
  TORCH_CHECK(tensor.dim() == 0, "simulated accelerator: a tensor of the host, of shape ", tensor.sizes(),
              ", beside a device's");
  at::Tensor copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

// Replaces each defined tensor in `values`, also in lists, by of(tensor).
template <class Of>
torch::jit::Stack mapped_tensors(torch::jit::Stack values, Of of) {
  for (c10::IValue& value : values)
    replace_boxed_tensors(value,
                          [&](const at::Tensor& tensor) { return tensor.defined() ? at::Tensor(of(tensor)) : tensor; });
  return values;
}

class KernelArguments {
 public:
  // Takes the arguments from the top of the stack. Replaces an unset generator by that of the device.
  KernelArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

  // Returns the device of the first tensor that is on a device, or of a device argument; nullopt if there is none.
  std::optional<int> device() const { return device_; }
  // Returns whether the operator draws random numbers, and so changes a generator.
  bool draws() const { return draws_; }
  std::vector<Access> accesses() const { return accesses_; }
  template <class Of>
  torch::jit::Stack mapped(Of of) const {
    return mapped_tensors(values_, of);
  }
  // Resizes `out` arguments, which may have any shape, to those of the results of shapes(). Calls shapes() only if
  // there are such arguments.
  template <class Shapes>
  void resize_outputs(Shapes shapes) const {
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < values_.size(); ++i)
      if (schema_.arguments()[i].is_out() && values_[i].isTensor()) outputs.push_back(values_[i].toTensor());
    if (outputs.empty()) return;
    const torch::jit::Stack results = shapes();
    for (size_t i = 0; i < outputs.size() && i < results.size(); ++i)
      if (results[i].isTensor() && outputs[i].sizes() != results[i].toTensor().sizes())
        outputs[i].resize_(results[i].toTensor().sizes());
  }
  // Returns the arguments to which the operator writes, and which are its results.
  torch::jit::Stack written_results() const;

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack values_;
  std::vector<Access> accesses_;
  std::optional<int> device_;
  bool draws_ = false;
};

}  // namespace tessera::accelerator
