#include <tessera/detail/converted_inputs.h>

#include <algorithm>
#include <optional>

#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera {
using namespace internal;

at::Tensor ConvertedInputs::convert(const at::Tensor& own, at::ScalarType dtype) {
  for (const Input& input : inputs_)
    if (input.own.is_same(own)) return input.given;
  std::optional<NoGradNoInferenceGuard> ordinary;  // tensors made in InferenceMode have no version counter
  if (c10::InferenceMode::is_enabled()) ordinary.emplace();
  const at::Tensor given = own.to(dtype);
  if (!given.is_same(own)) inputs_.push_back({own, given, given._version()});
  return given;
}

void ConvertedInputs::copy_changes() const {
  for (const Input& input : inputs_)
    if (input.given._version() != input.version) input.own.copy_(input.given);
}

at::Tensor ConvertedInputs::own_of(const at::Tensor& tensor) const {
  for (const Input& input : inputs_)
    if (input.given.is_same(tensor)) return input.own;
  return tensor;
}

bool ConvertedInputs::are_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::ranges::equal(some, others, [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
}

}  // namespace tessera
