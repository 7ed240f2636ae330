#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <string_view>

namespace tessera::testing_support {

// Returns how many tensors of at least `least_numel` elements this thread writes by copy_() while `body` runs.
template <class Body>
int large_copies(int64_t least_numel, Body body) {
  static thread_local int copies = 0;
  static thread_local int64_t least = 0;
  copies = 0;
  least = least_numel;
  const auto count = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    if (std::string_view(call.name()) == "aten::copy_" && call.inputs()[0].toTensor().numel() >= least) ++copies;
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return copies;
}

}  // namespace tessera::testing_support
