#pragma once

#include <functional>

namespace tessera::internal {

bool inside_backward();                           // whether this thread is running a node of a backward pass
void require_outside_backward(const char* call);  // otherwise throws std::logic_error, which begins with `call`

// Queues `callback` for the end of the backward pass that this thread is running. Must be called in a backward pass. If
// the pass fails, destroys the callback before backward() throws (later on a device with another library's engine).
void at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::internal
