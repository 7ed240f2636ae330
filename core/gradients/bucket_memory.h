#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "core/memory/counted_buffers.h"

namespace tessera::internal {

// Allocates buffers for buckets, and counts them together with the gradients that are sent without a copy. Used by one
// thread at a time.
class BucketMemory {
 public:
  explicit BucketMemory(at::Device device) : buffers_(device, MemoryKind::kBuckets) {}

  at::Tensor take(int64_t numel, at::ScalarType dtype) {
    at::Tensor buffer = buffers_.take(numel, dtype);
    note_peak();
    return buffer;
  }
  // The bytes of gradients that were borrowed, or, if negative, returned.
  void count_borrowed(int64_t bytes) {
    borrowed_bytes_ += bytes;
    note_peak();
  }
  void forget_borrowed() { borrowed_bytes_ = 0; }

  int64_t bytes() const { return buffers_.lent_bytes() + borrowed_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  void reset_peak() { peak_bytes_ = bytes(); }

 private:
  void note_peak() { peak_bytes_ = std::max(peak_bytes_, bytes()); }

  CountedBuffers buffers_;
  int64_t borrowed_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace tessera::internal
