#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace tessera {

// Counts the bytes of tensors: on the CPU as requested, on an accelerator as rounded up by the device's allocator.
//
//   tessera::PeakMemory memory;
//   auto model = Gpt(config);
//   std::cout << memory.current_bytes() << " now, " << memory.peak_bytes() << " at most\n";
//
// On the CPU, counts the bytes that this thread has allocated since its first PeakMemory was made, minus those freed by
// any thread. So ranks that are threads are counted separately. The process's first PeakMemory installs a counting
// allocator in front of libtorch's. Earlier tensors are not counted, so make that object early. On an accelerator,
// reads the statistics of the caching allocator, which count all threads; construction and reset() reset its peak.
//
// The counts include temporary memory of kernels, not only tensors. Must be used by the thread that made the object.
// Like torch.cuda.max_memory_allocated, but also for the CPU.
class PeakMemory {
 public:
  // An accelerator without an index is the thread's current device. Throws std::invalid_argument if the device's
  // allocator has no statistics.
  explicit PeakMemory(c10::Device device = c10::kCPU);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  int64_t current_bytes() const;
  int64_t peak_bytes() const;  // maximum of current_bytes() since construction or reset()
  void reset();                // restarts the peak from the current bytes

  struct Account;  // the allocations of one thread

 private:
  const c10::Device device_;
  std::shared_ptr<Account> account_;  // null on an accelerator
  int64_t peak_bytes_ = 0;            // on the CPU: the peak, which `account_` updates
};

}  // namespace tessera
