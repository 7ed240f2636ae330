#include "tessera/comm/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace tessera {

at::Tensor BufferPool::take(int64_t bytes) {
  std::lock_guard lock(mutex_);
  lent_bytes_ += bytes;
  peak_lent_bytes_ = std::max(peak_lent_bytes_, lent_bytes_);
  high_water_bytes_ = std::max(high_water_bytes_, lent_bytes_);
  if (auto same = idle_.find(bytes); same != idle_.end()) {
    at::Tensor buffer = std::move(same->second.back());
    same->second.pop_back();
    if (same->second.empty()) idle_.erase(same);
    idle_bytes_ -= bytes;
    return buffer;
  }
  while (!idle_.empty() && lent_bytes_ + idle_bytes_ > high_water_bytes_) {
    auto largest = std::prev(idle_.end());
    idle_bytes_ -= largest->first;
    largest->second.pop_back();
    if (largest->second.empty()) idle_.erase(largest);
  }
  // Buffers outlive an evaluation under InferenceMode, whose tensors could not be written later.
  c10::InferenceMode ordinary(false);
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

void BufferPool::give(at::Tensor buffer) {
  std::lock_guard lock(mutex_);
  const int64_t bytes = buffer.numel();
  lent_bytes_ -= bytes;
  idle_bytes_ += bytes;
  idle_[bytes].push_back(std::move(buffer));
}

void BufferPool::trim() {
  std::lock_guard lock(mutex_);
  idle_.clear();
  idle_bytes_ = 0;
#ifdef __GLIBC__
  // glibc keeps freed blocks below 32 MiB for itself once it has seen them come and go.
  // One thread at a time: where another allocator serves malloc, glibc's has yet to set itself up, unlocked.
  static std::mutex trimming;
  std::lock_guard lock_trimming(trimming);
  if (device_.is_cpu()) ::malloc_trim(0);
#endif
}

int64_t BufferPool::lent_bytes() const {
  std::lock_guard lock(mutex_);
  return lent_bytes_;
}

int64_t BufferPool::peak_lent_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_lent_bytes_;
}

void BufferPool::reset_peak() {
  std::lock_guard lock(mutex_);
  peak_lent_bytes_ = lent_bytes_;
}

}  // namespace tessera
