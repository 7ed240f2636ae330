#pragma once

#include <cstdint>

namespace tessera {

// What OSS does in host memory (ZeRO-Offload, Ren et al., 2021), for parameters that stay on their device.
struct OssOffload {
  // Copies of the parameters that this rank owns lie there, and so does their state: the optimizer steps the copies,
  // and the new values travel back.
  bool params = false;
  // Gradients on the device are dropped once they have left. With `params` only: the step needs both in one place.
  bool grads = false;
  // In page-locked memory, which devices copy from and to without the host's help.
  bool pin_memory = true;
  // The most host memory for copies and gradients, in bytes. 0: no bound. Beyond it step() throws
  // std::runtime_error that says what the memory was for, with nothing changed.
  int64_t host_limit_bytes = 0;
};

}  // namespace tessera
