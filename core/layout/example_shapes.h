#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::internal {

// Calls an operator whose arguments on the stack are meta tensors, and replaces them by the meta results. If libtorch
// has no meta kernel, runs the operator on CPU tensors of zeros and ones, but keeps the default generator's state.
// Throws std::logic_error, naming the operator, if it has no meta kernel and its result shapes may depend on values.
void call_for_shapes(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace tessera::internal
