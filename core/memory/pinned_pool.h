#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tessera::internal {

struct PinnedPoolOptions {
  // The device that copies from and to this memory.
  at::Device device = at::kCPU;
  // Page-locked, so that copies run beside host and device. On a CPU, which needs no locked pages, the memory is
  // ordinary.
  bool pin = true;
  // The most that the pool may own, lent or idle. 0: no bound.
  int64_t limit_bytes = 0;
};

// Host memory that a device exchanges data with: lent as tensors, reused when they die.
//
// Page-locking costs system calls and stalls, so memory once locked is kept for the next tensor of the same number of
// pages. The pool owns at most what was lent at one time, and frees idle memory of other sizes before it asks for more.
// It keeps none that is not locked: MemoryCache is there for that.
// Counts are of what is taken: locked memory in whole pages (bytes_when_page_locked()), other memory as asked for.
// Thread-safe; tensors may outlive the pool.
class PinnedPool {
 public:
  explicit PinnedPool(PinnedPoolOptions options);

  // An uninitialised tensor [numel] in host memory, which comes back when the last reference to its storage goes, on
  // any thread. Throws std::runtime_error that names `what`, with nothing changed, if the pool would own more than its
  // limit.
  at::Tensor take(int64_t numel, at::ScalarType dtype, const std::string& what);

  bool is_pinned() const;
  int64_t lent_bytes() const;
  int64_t peak_lent_bytes() const;
  int64_t owned_bytes() const;  // lent and idle

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the tensors
};

}  // namespace tessera::internal
