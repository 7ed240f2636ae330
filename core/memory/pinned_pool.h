#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tessera::internal {

struct PinnedPoolOptions {
  // The device that copies to and from this memory.
  at::Device device = at::kCPU;
  // Whether memory is page-locked, so that copies overlap with computation. Ignored on a CPU: memory is ordinary.
  bool pin = true;
  // Limit of the bytes that the pool owns, in use or idle. 0 means no limit. Must not be negative.
  int64_t limit_bytes = 0;
};

// A pool of host memory for copies to and from a device. Tensors return their memory when they are destroyed.
//
// Page-locking costs system calls and stalls, so the pool keeps locked memory for the next tensor with the same number
// of pages. The pool owns at most the peak of the bytes in use: it frees idle memory before it would exceed that peak.
// It keeps no unlocked memory, which MemoryCache caches. Byte counts and the limit are of whole pages if locked
// (bytes_when_page_locked()). Thread-safe; tensors may outlive the pool.
class PinnedPool {
 public:
  explicit PinnedPool(PinnedPoolOptions options);

  // Returns an uninitialised tensor [numel] in host memory. The memory returns to the pool with the last reference to
  // the tensor's storage, on any thread. If the pool would exceed its limit, throws std::runtime_error that names
  // `what`, and changes nothing.
  at::Tensor take(int64_t numel, at::ScalarType dtype, const std::string& what);

  int64_t lent_bytes() const;
  int64_t peak_lent_bytes() const;
  int64_t owned_bytes() const;  // bytes in use and idle

 private:
  struct State;
  std::shared_ptr<State> state_;  // also owned by the tensors
};

}  // namespace tessera::internal
