#pragma once

#include <cstdint>

namespace tessera {

// What OSS does in host memory (ZeRO-Offload, Ren et al., 2021), for parameters that stay on their device. Memory, and
// its limit, may be others on other ranks.
struct OssOffload {
  // Copies of the parameters that this rank owns lie there, and so does their state: the optimizer steps the copies,
  // and the new values travel back.
  bool params = false;
  // Gradients on the device are dropped once they have left: until zero_grad() an error, which names the parameter, is
  // in their place. The step needs both in one place, so `params` goes with it, whether set or not.
  bool grads = false;
  // In page-locked memory, which devices copy from and to without the host's help.
  bool pin_memory = true;
  // The most host memory for copies and gradients, in bytes. 0: no bound. Beyond it step() throws
  // std::runtime_error that says what the memory was for, with nothing changed.
  int64_t host_limit_bytes = 0;
};

}  // namespace tessera
