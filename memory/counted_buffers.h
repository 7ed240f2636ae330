#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera {

// Lends uninitialised flat buffers and counts the bytes that are lent. It keeps none of them: on CPUs the
// MemoryCache gives a buffer's memory to the next one of its size, on accelerators libtorch's allocator does.
// Thread-safe; buffers may outlive it.
class CountedBuffers {
 public:
  explicit CountedBuffers(at::Device device);

  // A buffer [numel], 64-byte aligned. Its bytes count until the last reference to its storage goes, on whichever
  // thread; on a device with streams, let go of it only when the stream that allocates next is ordered after the
  // last use.
  at::Tensor take(int64_t numel, at::ScalarType dtype);

  int64_t lent_bytes() const;
  int64_t peak_lent_bytes() const;  // since construction or reset_peak()
  void reset_peak();

 private:
  struct Counts;
  const at::Device device_;
  const std::shared_ptr<Counts> counts_;  // shared with the buffers
};

}  // namespace tessera
