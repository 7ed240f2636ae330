#pragma once

#include <functional>

namespace tessera::internal {

// Whether this thread runs a node of a backward pass.
bool inside_backward();

// Calls `callback` at the end of the backward pass that this thread runs. If the pass fails, autograd destroys it
// without a call, before backward() throws.
void at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::internal
