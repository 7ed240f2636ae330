#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace tessera {

// Lends uninitialised flat buffers and takes them back for the next borrower of the same size.
//
// Allocating anew costs page faults on every step, and glibc keeps freed buffers of odd sizes, so
// that resident memory grows far above what is in use. The pool never owns more than the most
// that was lent at one time: before it allocates, it frees idle buffers of other sizes to stay
// below that. Thread-safe.
class BufferPool {
 public:
  explicit BufferPool(at::Device device) : device_(device) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // A buffer of `bytes` bytes (uint8, 1-D), 64-byte aligned. The caller gives it back; on a device
  // with streams only when the stream that allocates next is ordered after the last use.
  at::Tensor take(int64_t bytes);
  void give(at::Tensor buffer);
  // Frees what is not lent, and gives the memory that the process has freed so far back to the system.
  // For when what came before was not typical of what follows: construction, the first backward.
  void trim();

  int64_t lent_bytes() const;
  int64_t peak_lent_bytes() const;  // since construction or reset_peak()
  void reset_peak();

 private:
  const at::Device device_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<at::Tensor>> idle_;  // by number of bytes
  int64_t idle_bytes_ = 0;
  int64_t lent_bytes_ = 0;
  int64_t peak_lent_bytes_ = 0;   // as reported
  int64_t high_water_bytes_ = 0;  // the bound on what the pool owns; never reset
};

}  // namespace tessera
