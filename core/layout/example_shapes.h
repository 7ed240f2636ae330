#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::internal {

// Calls an operator with arguments on the meta device. Without a meta kernel in libtorch, it runs on CPU tensors of
// zeros and ones if the shapes of its results do not depend on values. The results become meta tensors. Draws nothing
// from the default generator. Otherwise throws std::logic_error that names the operator.
void call_for_shapes(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace tessera::internal
