#pragma once

#include <functional>

namespace tessera::internal {

// Returns whether this thread runs a node of a backward pass now.
bool inside_backward();

// Queues `callback` for the end of the backward pass that this thread runs. Must be called in a backward pass. If the
// pass fails, the callback is destroyed without a call, before backward() throws.
void at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::internal
