#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace tessera {

// Counts the bytes that tensors take, exactly, as they are asked of the allocator.
//
//   tessera::PeakMemory memory;
//   auto model = Gpt(config);
//   std::cout << memory.current_bytes() << " now, " << memory.peak_bytes() << " at most\n";
//
// On the CPU: what this thread has allocated since its first PeakMemory was made, less what of that has been freed
// since, on any thread. So ranks that are threads are counted apart. The first PeakMemory of the process puts a
// counting allocator before libtorch's; older tensors are not known, so make one at the start. On an accelerator: what
// the device's caching allocator says it has handed out, by all threads; reset() resets its peak.
//
// It counts all that kernels take from libtorch's allocator for a moment, not tensors' data alone. Used by the thread
// that made it. (torch.cuda.max_memory_allocated, for the CPU too.)
class PeakMemory {
 public:
  // Throws std::invalid_argument for a device whose allocator does not count.
  explicit PeakMemory(c10::Device device = c10::kCPU);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  int64_t current_bytes() const;
  int64_t peak_bytes() const;  // the most of current_bytes() since construction or reset()
  void reset();                // the peak starts again from what is there now

  struct Account;  // of one thread's allocations

 private:
  const c10::Device device_;
  std::shared_ptr<Account> account_;  // null on an accelerator
  int64_t peak_bytes_ = 0;            // as the account tells when something grows
};

}  // namespace tessera
